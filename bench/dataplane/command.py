"""`router bench dataplane`: what passing a request on costs, beside other routers; its targets.

CPU of small and of       mode kv: at most 0.5 and 0.6 of the best cache-aware peer's. With a model's tokenizer: at most
40 KB requests,           1.0 and 1.5 of that peer's, which tokenizes nothing, and 0.25 and 0.35 of Dynamo's.
saturated                 Round robin: at most 0.65 of the best peer's in round robin
a stream of 8 chunks      at most 0.8 of the best peer's CPU in round robin
a streamed chunk          at most 0.7 of the best peer's CPU in bursts, 1.0 at a high rate
latency added             at a modest rate, p50: at most the best peer's
a slow reader             takes less than 1 MiB of memory
a client that leaves      its stream is cut off within 5 ms
streams at once           all open at one moment, all complete, without an error
tracing on                no request sampled: at most 5 us of CPU a small request more than without (with `--tracing`)
control                   no added latency is negative

The best peer is the one with the lowest value in that cell, with any of its policies if none is named.
"""

import os
from collections.abc import Iterator
from statistics import median
from typing import Any

import click

from bench.child import finished
from bench.dataplane.run import (
    BURST,
    CRAWLED,
    HELD,
    HIGH_RATE,
    IDLE,
    LARGE,
    LEFT,
    PACED,
    SMALL,
    STREAM,
    Bench,
    DataplaneResults,
    MeasuredShape,
)
from bench.dataplane.systems import (
    CACHE,
    DIRECT,
    DYNAMO,
    KV,
    OURS,
    PEERS,
    ROUND_ROBIN,
    UNSAMPLED,
    SystemPlan,
    found,
    on_core,
)
from bench.tables import (
    FigureTable,
    Verdict,
    at_least,
    at_most,
    number,
    progress,
    report,
    report_options,
    verdict_table,
)

PLAIN = SystemPlan(OURS, ROUND_ROBIN).name
AWARE = SystemPlan(OURS, KV).name
TOKENIZING = SystemPlan(OURS, KV, text="a model").name
_CPU_TARGETS = (
    (AWARE, CACHE, {SMALL: 0.5, LARGE: 0.6}),
    (TOKENIZING, CACHE, {SMALL: 1.0, LARGE: 1.5}),
    (TOKENIZING, DYNAMO, {SMALL: 0.25, LARGE: 0.35}),
    (PLAIN, ROUND_ROBIN, {SMALL: 0.65, LARGE: 0.65, STREAM: 0.8}),
    (PLAIN, None, {BURST: 0.7, HIGH_RATE: 1.0}),
)
"""Our system, the peers that it is compared with (those of a policy, Dynamo, or all), and each cell's highest ratio."""
_CELLS = {
    SMALL: "a small request",
    LARGE: "a request of 40 KB",
    PACED: "a small request, paced",
    STREAM: "a stream of 8 chunks",
    BURST: "a chunk in bursts",
    HIGH_RATE: "a chunk, high rate",
}


def _cpu(results: DataplaneResults) -> FigureTable:
    rows = []
    for plan in results.systems:
        if plan.kind != DIRECT:
            figures = (number(results.figure(plan.name, cell, "cpu_us")) for cell in _CELLS)
            rate, nats_us = (results.figure(plan.name, SMALL, each) for each in ("rate", "nats_cpu_us"))
            rows.append((plan.name, *figures, number(rate), number(nats_us or None)))
    columns = ("system", *_CELLS.values(), "small requests/s", "its nats-server, small")
    return FigureTable("CPU us", columns, rows)


_REST = {
    "RSS, MiB": (SMALL, "rss_mib"),
    "streams at once": (HELD, "at_once"),
    "failed": (HELD, "errors"),
    "chunks missing": (HELD, "missing"),
    "RSS with them": (HELD, "rss_most_mib"),
    "slow reader, MiB": (CRAWLED, "rss_more_mib"),
    "left, p50 ms": (LEFT, "p50_ms"),
    "left, worst ms": (LEFT, "worst_ms"),
    "left unseen": (LEFT, "unseen"),
    "idle, CPU ms/s": (IDLE, "cpu_ms_a_second"),
}


def _rest(results: DataplaneResults) -> FigureTable:
    rows = []
    for plan in results.systems:
        added = (number(added_us(results, plan.name, each)) for each in ("p50_us", "p99_us"))
        if plan.kind == DIRECT:
            added = (f"({number(results.figure(plan.name, PACED, each))})" for each in ("p50_us", "p99_us"))
        figures = (number(results.figure(plan.name, *of)) for of in _REST.values())
        rows.append((plan.name, *added, *figures, str(results.errors(plan.name))))
    columns = ("system", "added p50, us", "added p99, us", *_REST, "errors")
    return FigureTable("latency, memory, streams (direct: its own latency)", columns, rows)


def added_us(results: DataplaneResults, system: str, quantile: str) -> float | None:
    """Return the latency at the modest rate, minus that of direct requests in the same round: the rounds' median."""
    pairs = zip(results.of(system, PACED, quantile), results.of(DIRECT, PACED, quantile), strict=False)
    found = [proxied - direct for proxied, direct in pairs]
    return median(found) if found else None


def best_peer(results: DataplaneResults, cell: str, of: str | None = None) -> str:
    """Return the peer with the least CPU in a cell; empty: none was measured.

    `of`: a policy of peers, or Dynamo alone; None: every peer but Dynamo.
    """
    peers = [plan for plan in results.systems if (plan.kind if of == DYNAMO else plan.policy) == of or of is None]
    names = [plan.name for plan in peers if plan.kind in ((DYNAMO,) if of == DYNAMO else PEERS)]
    found = [(cpu_us, name) for name in names if (cpu_us := results.figure(name, cell, "cpu_us")) is not None]
    return min(found, default=(0.0, ""))[1]


def verdicts(results: DataplaneResults) -> list[Verdict]:
    """Return the verdict on every target."""
    return [*_of_cpu(results), *_of_latency(results), *_of_streams(results)]


def _of_cpu(results: DataplaneResults) -> Iterator[Verdict]:
    for ours, of, most in _CPU_TARGETS:
        peers = "Dynamo's" if of == DYNAMO else f"the best peer's{f', {of}' if of else ''}"
        for cell, needed in most.items():
            best = best_peer(results, cell, of)
            found = results.ratio(cell, "cpu_us", ours, best)
            yield at_most(f"CPU of {_CELLS[cell]} ({ours}), over {peers}", needed, [(f"against {best}", found)])


def _of_latency(results: DataplaneResults) -> Iterator[Verdict]:
    peers = [plan.name for plan in results.systems if plan.kind in PEERS]
    found = [(us, name) for name in peers if (us := added_us(results, name, "p50_us")) is not None]
    ours, (best_us, best) = added_us(results, PLAIN, "p50_us"), min(found, default=(0.0, ""))
    share = ours / best_us if ours is not None and best_us > 0 else None
    yield at_most("latency added at a modest rate, p50, over the best peer's", 1.0, [(f"against {best}", share)])
    proxies = [plan.name for plan in results.systems if plan.kind != DIRECT]
    added = [(name, added_us(results, name, "p50_us")) for name in proxies]
    yield at_least("control: the latency that a proxy adds", 0.0, added, " us")


def _of_streams(results: DataplaneResults) -> Iterator[Verdict]:
    for system in (PLAIN, AWARE):

        def figure(cell: str, name: str, system: str = system) -> float | None:
            return results.figure(system, cell, name)

        crawled = [("", figure(CRAWLED, "rss_more_mib"))]
        yield at_most(f"memory for a reader that does not read ({system})", 1.0, crawled, " MiB")
        worst = float("inf") if figure(LEFT, "unseen") else figure(LEFT, "worst_ms")
        yield at_most(f"a client that leaves, at worst ({system})", 5.0, [("", worst)], " ms")
        held = figure(HELD, "streams") or 0.0
        yield at_least(f"streams open at once ({system})", held, [("", figure(HELD, "at_once"))], "")
        failed = [(name, figure(HELD, name)) for name in ("errors", "missing")]
        yield at_most(f"of them failed, or chunks missing ({system})", 0.0, failed, "")

    if UNSAMPLED in results.systems:
        pairs = zip(results.of(UNSAMPLED.name, SMALL, "cpu_us"), results.of(AWARE, SMALL, "cpu_us"), strict=True)
        more_us = median(traced - plain for traced, plain in pairs)
        yield at_most("CPU that tracing adds to a small request, unsampled", 5.0, [("", more_us)], " us")


_OF_SHAPE = ("rounds", "seconds", "rate", "streams", "crawl_s")
_QUICK = {"rounds": 1, "seconds": 0.4, "streams": 200, "crawl_s": 1.0}
_QUICK_ONLY = {"held_chunks": 2, "left_times": 5}
_NAMED = (*PEERS, DYNAMO)


def cores() -> tuple[int, int]:
    """Return a core for the systems, and a core for all other processes; -1 for both if there is no choice."""
    if not hasattr(os, "sched_getaffinity"):
        return -1, -1
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[-1], allowed[0]) if len(allowed) > 1 else (-1, -1)


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
    """Measure the data plane: CPU of a request and a chunk, latency, memory, streams; beside other routers.

    Ours is a real `router` process with metrics, ledger and journal on. Back end and clients are processes of their
    own, on another core; all systems are up at once and take turns. CPU is the system's own, so that other programs on
    the machine disturb little. Peers are no dependency: those on PATH or named with --peer take part; for Dynamo,
    --peer names the Python of an environment with ai-dynamo. The exit status says whether the bench ran.
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
    made = [_cpu(results), _rest(results), verdict_table(verdicts(results))]
    measured = {"shape": shape._asdict(), "cells": results.plain()}
    own, others = shape.cores
    facts = [
        f"each system on core {own}, all else on {others}" if own >= 0 else "not pinned to cores",
        f"medians of {shape.rounds} rounds of {shape.seconds:g} s a cell, systems in turns",
        f"CPU is the system's own; small: 300 bytes; paced: every {1000 / shape.rate:g} ms, come what may",
        *results.absent,
    ]
    report(facts, made, measured, flags["json_file"], flags["markdown"])


async def _measured(shape: MeasuredShape, plans: list[SystemPlan]) -> DataplaneResults:
    async with Bench(shape) as bench:
        await bench.begin(plans)
        with progress(bench.steps) as on_progress:
            return await bench.run(on_progress)
