"""The commands of `router bench`."""

import click

from bench.dataplane.command import dataplane
from bench.events.command import events
from bench.fidelity.live_command import live
from bench.index.command import index
from bench.placement.command import placement
from bench.request.command import request
from bench.soak.command import soak
from bench.sweep.command import sweep
from bench.sweep.report_command import report


@click.group()
def bench() -> None:
    """Measure it: every bench states the machine, and prints losses too."""


for command in (dataplane, events, index, live, placement, report, request, soak, sweep):
    bench.add_command(command)
