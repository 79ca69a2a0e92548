"""The commands of `router bench`."""

import click

from bench.index import index
from bench.trace_command import trace

COMMANDS: dict[str, click.Command] = {"index": index, "trace": trace}
