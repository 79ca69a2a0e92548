"""`router bench dataplane`: what passing a request on costs, beside other routers."""

import os
from typing import Any

import click

from bench.child import finished
from bench.dataplane.report import facts, tables, verdicts
from bench.dataplane.run import Bench, DataplaneResults, MeasuredShape
from bench.dataplane.systems import DIRECT, DYNAMO, NGINX, PEERS, SystemPlan, found, on_core
from bench.tables import progress, report, report_options, verdict_table

_OF_SHAPE = ("rounds", "seconds", "rate", "streams", "crawl_s")
_QUICK = {"rounds": 1, "seconds": 0.4, "streams": 200, "crawl_s": 1.0}
_QUICK_ONLY = {"held_chunks": 2, "left_times": 5}
_TWO = 2
_NAMED = (NGINX, *PEERS, DYNAMO)


def cores() -> tuple[int, int]:
    """Return a core for the systems, and one for all others; -1 where there is no choosing."""
    if not hasattr(os, "sched_getaffinity"):
        return -1, -1
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[-1], allowed[0]) if len(allowed) >= _TWO else (-1, -1)


def _named(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    named = []
    for value in values:
        name, _, path = value.partition("=")
        if name not in _NAMED or not path:
            raise click.BadParameter(f"found {value!r}, allowed NAME=EXECUTABLE of {', '.join(_NAMED)}")
        named.append((name, path))
    return named


@click.command("dataplane", context_settings={"show_default": True})
@click.option("--peer", "peers", multiple=True, callback=_named, help="NAME=EXECUTABLE of a peer that is not on PATH")
@click.option(
    "--text",
    default="",
    help="directory of a model: ours in mode kv with its tokenizer, too, and Dynamo, which also wants its config.json, "
    "if --peer names it",
)
@click.option("--only", help="systems whose names contain one of these words, by commas; direct is always there")
@click.option("--rounds", type=click.IntRange(min=1), default=9, help="turns of every system; medians are shown")
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=1.5, help="how long a cell of a round takes")
@click.option("--rate", type=click.FloatRange(1, 10_000), default=200.0, help="requests a second at the modest rate")
@click.option("--streams", type=click.IntRange(1, 8000), default=8000, help="streams at once, a chunk every 2 s")
@click.option(
    "--crawl", "crawl_s", type=click.FloatRange(0.1, 60), default=6.0, help="seconds in which no client reads"
)
@click.option("--tracing", is_flag=True, help="ours in mode kv with tracing on, too: no request sampled, and all")
@click.option("--quick", is_flag=True, help="one short round: does it run at all")
@report_options
def dataplane(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure the data plane: CPU of a request and a chunk, latency, memory, streams; beside nginx and other routers.

    Ours is a real `router` process with metrics, ledger and journal on. Back end and clients are processes of their
    own, on another core; all systems are up at once and take turns. CPU is the system's own, so that other programs on
    the machine disturb little. Peers are no dependency: those on PATH or named with --peer take part; of Dynamo --peer
    names the Python of an environment with ai-dynamo. The exit status
    says whether the bench ran.
    """
    if flags["quick"]:
        flags |= _QUICK
    more = _QUICK_ONLY if flags["quick"] else {}
    shape = MeasuredShape(cores=cores(), **more, **{name: flags[name] for name in _OF_SHAPE})
    plans, absent = found(flags["peers"], traced=flags["tracing"], text=flags["text"])
    words = (flags["only"] or "").split(",")
    selected = [plan for plan in plans if plan.kind == DIRECT or any(word in plan.name for word in words)]
    with on_core(shape.cores[1]):
        results = finished(_measured(shape, selected))
    results.absent[:0] = absent
    made = [*tables(results), verdict_table(verdicts(results))]
    measured = {"shape": shape._asdict(), "cells": results.plain()}
    report(facts(shape, results), made, measured, flags["json_file"], flags["markdown"])


async def _measured(shape: MeasuredShape, plans: list[SystemPlan]) -> DataplaneResults:
    async with Bench(shape) as bench:
        await bench.begin(plans)
        with progress(bench.steps) as on_progress:
            return await bench.run(on_progress)
