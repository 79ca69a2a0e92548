"""The commands of `router bench`."""

import click

from bench.bodies import bodies
from bench.dataplane import dataplane
from bench.decision import decision
from bench.disagg import disagg
from bench.drain import drain
from bench.events import events
from bench.hot_spots_command import hot_spots
from bench.index import index
from bench.oracle import oracle
from bench.soak.command import soak
from bench.trace_command import trace

COMMANDS: dict[str, click.Command] = {
    "bodies": bodies,
    "dataplane": dataplane,
    "decision": decision,
    "disagg": disagg,
    "drain": drain,
    "oracle": oracle,
    "events": events,
    "hot-spots": hot_spots,
    "index": index,
    "soak": soak,
    "trace": trace,
}
