"""The commands of `router bench`."""

import click

from bench.events import events
from bench.index import index
from bench.trace_command import trace

COMMANDS: dict[str, click.Command] = {"events": events, "index": index, "trace": trace}
