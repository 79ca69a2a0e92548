"""The commands of `router bench`."""

import click

from bench.bodies.command import bodies
from bench.dataplane.command import dataplane
from bench.decision.command import decision
from bench.disagg.command import disagg
from bench.drain import drain
from bench.events.command import events
from bench.index.command import index
from bench.oracle.command import oracle
from bench.routing.command import trace
from bench.routing.hot_spots_command import hot_spots
from bench.soak.command import soak

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
