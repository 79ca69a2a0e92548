"""`router bench events`: the path of KV events from an engine's flush into an index; its targets.

freshness   an event's age when the index applies it: p50 <= 5 ms, p99 <= 50 ms, at every rate, and while requests flow
cold start  of a million held blocks from a snapshot: caught up, and every rank proven, within 3 s
control     no lag is less than a bare message's, and no path passes more blocks a second than a bare publication
"""

from typing import Any

import click
import psutil

from bench.child import BenchFailed, finished
from bench.events.run import OURS, QUICK, EventsPlan
from bench.events.throughput import cold, freshness, throughput
from bench.processes import ProcessFailed
from bench.tables import (
    FigureTable,
    Rounds,
    Verdict,
    at_least,
    at_most,
    names_of,
    number,
    progress,
    report,
    report_options,
    verdict_table,
)
from kv_runtime.event_log import BrokerUnavailable
from kv_runtime.nats_server import NatsServerError

_POLL_S = 1.0
_MEASURED = {"freshness": freshness, "throughput": throughput, "cold start": cold}
GROUPS = tuple(_MEASURED)


@click.command("events", context_settings={"show_default": True})
@click.option("--only", callback=names_of(GROUPS), default=",".join(GROUPS), help="groups that are measured")
@click.option("--quick", is_flag=True, help="very little of all: does it run")
@report_options
def events(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure the event plane on real processes: agents, a nats-server, an index, all on this host.

    \b
    freshness    how old an event is when it is applied, at given rates and while requests flow
    throughput   how many blocks a second pass, by blocks an event, and what CPU they take
    cold start   how soon a new index is current, from a snapshot, the log, or dumps

    Beside each stands what the log alone needs for the same, with a bare client. At the end stands what the targets ask
    for, reached or missed. The exit status says whether the bench ran.
    """  # noqa: D301  (click reads the character, not its name)
    plan, found = QUICK if flags["quick"] else EventsPlan(), Rounds()
    others = f"before it began, others used {psutil.cpu_percent(_POLL_S):.0f}% of the machine"

    async def measured() -> Rounds:
        with progress(0) as on_progress:
            for group in flags["only"]:
                await _MEASURED[group](plan, found, on_progress)
        return found

    finished(measured(), (BenchFailed, ProcessFailed, NatsServerError, BrokerUnavailable))
    made = [*tables(found), *([] if flags["quick"] else [verdict_table(verdicts(found))])]
    report([others], made, {"cells": found.plain()}, flags["json_file"], flags["markdown"])


def tables(found: Rounds) -> list[FigureTable]:
    """Return a table for each group that was measured, medians of its rounds."""
    made = []
    for group in GROUPS:
        cells = found.cells(group)
        names = list(dict.fromkeys(name for cell in cells for each in found.rounds[OURS, cell] for name in each))
        rows = [(cell, *(number(found.figure(OURS, cell, name)) for name in names)) for cell in cells]
        made += [FigureTable(f"{group}; ages in ms, CPU in s a million blocks", ("cell", *names), rows)][: len(rows)]
    return made


def verdicts(found: Rounds) -> list[Verdict]:
    """Return the verdict on every target, and on the controls."""

    def of(beginning: str, name: str) -> list[tuple[str, float | None]]:
        return [(cell, found.figure(OURS, cell, name)) for cell in found.cells(beginning)]

    def over(group: str, above: str, below: str) -> list[tuple[str, float | None]]:
        ones, others = of(group, above), of(group, below)
        pairs = [(cell, one, other) for (cell, one), (_, other) in zip(ones, others, strict=True)]
        return [(cell, one / other if one and other else None) for cell, one, other in pairs]

    return [
        at_most("engine's flush to applied, p50", 5, of("freshness", "p50"), " ms"),
        at_most("engine's flush to applied, p99", 50, of("freshness", "p99"), " ms"),
        at_most("cold start, caught up", 3, of("cold start, from a snapshot", "caught up s"), " s"),
        at_most("cold start, all proven", 3, of("cold start, from a snapshot", "all proven s"), " s"),
        at_least("control: no median lag is less than a bare message's", 1, over("freshness", "p50", "bare p50")),
        at_least(
            "control: no path is faster than a bare publication", 1, over("throughput", "bare blocks/s", "blocks/s")
        ),
    ]
