"""The commands of `router bench`."""

import click

from bench.trace_command import trace

COMMANDS: dict[str, click.Command] = {"trace": trace}
