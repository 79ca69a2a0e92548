"""`router bench decision`: how long it takes to place a request, by stage.

hash     token ids (bytes) to sequence hashes            match    the index's answer of all ranks
decide   all else until there is a verdict                record   the journal's recorder takes the verdict
total    hash to verdict, as one call after another, in a separate run
cpu      the part of it in which this thread was running

A second table has what a request costs from its decision to the journal's bytes (`request.py`).

Between two decisions one lease begins and another ends, so that only the fleet stays the same.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
from rich.console import Console
from rich.table import Table

from bench.decision.fleet import BLOCK_SIZE, DecisionFleet, DecisionShape
from bench.decision.request import REQUEST_STAGES, RequestCost, request_cost
from bench.report import machine_line, percentile
from bench.routing.virtual_worker import TEXT
from indexer.embedded import hash_blocks
from kv_protocol.decided import RouteRequest
from kv_runtime.clock import SystemClock
from router.decision.policies import MODES
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.journal.config import JournalSection
from router.journal.writer import JournalWriter

if TYPE_CHECKING:
    from kv_runtime.event_log import EventLog
    from router.decision.routing import Lease

STAGES = ("hash", "match", "decide", "record", "total", "cpu")
TARGETS_US = {"total p50": 100.0, "total p99": 300.0, "match p50": 20.0}
"""At 64 ranks and 512 blocks."""
_TARGET_SHAPE = DecisionShape(64, 512, "kv")
_SEED = 1


class Timed(NamedTuple):
    """One cell: the time of every stage, in us, at two quantiles."""

    shape: DecisionShape
    decisions: int
    p50_us: dict[str, float]
    p99_us: dict[str, float]
    request: RequestCost | None = None


class _Running:
    """Requests in flight, as many as at the beginning."""

    def __init__(self, fleet: DecisionFleet) -> None:
        self._fleet = fleet
        self._leases: list[Lease] = []

    def go_on(self, request: RouteRequest) -> None:
        """The request is promised where it is placed now; the one before it is over."""
        routing = self._fleet.routing
        self._leases.append(routing.take(routing.decide(request)))
        for lease in self._leases[:-1]:
            lease.end("ok")
        del self._leases[:-1]
        self._fleet.clock.now_s += 1e-3


def measured(shape: DecisionShape, decisions: int) -> Timed:
    """Take `decisions` decisions in a fleet of this shape; return the times of each stage."""
    writer = _writer()
    fleet = DecisionFleet(shape, _SEED, writer)
    running, times = _Running(fleet), defaultdict[str, list[float]](list)
    for request in fleet.requests(decisions):
        running.go_on(request)
        _stages(fleet, request, times, writer)
    for request, tokens in zip(fleet.requests(decisions), _cycled(fleet.prompts, decisions), strict=True):
        running.go_on(request)
        began_ns, ran_ns = perf_counter_ns(), thread_time_ns()
        fleet.routing.decide(fleet.request(tokens))
        times["cpu"].append((thread_time_ns() - ran_ns) / 1e3)
        times["total"].append((perf_counter_ns() - began_ns) / 1e3)
    return Timed(shape, decisions, _at(times, 0.5), _at(times, 0.99), request_cost(shape, decisions))


def _writer() -> JournalWriter:
    """Return a writer whose records are not published."""
    nowhere = cast("EventLog", None)
    made_of = StateSettings(text=TEXT)
    return JournalWriter(
        nowhere,
        SystemClock(),
        JournalSection(),
        router="bench",
        made_of=made_of,
        state=RouterState(made_of),
        kv_seq=lambda: 0,
        buffer_records_max=4096,
    )


def _stages(fleet: DecisionFleet, request: RouteRequest, times: dict[str, list[float]], writer: JournalWriter) -> None:
    state, now_s = fleet.state, fleet.clock.now_s
    tokens = fleet.prompts[len(times["hash"]) % len(fleet.prompts)]

    def timed(stage: str, act: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever it returns
        began_ns = perf_counter_ns()
        found = act()
        times[stage].append((perf_counter_ns() - began_ns) / 1e3)
        return found

    timed("hash", lambda: hash_blocks(tokens, BLOCK_SIZE))
    ranks = state.model_view(request.model, *request.hashing, now_s).ranks
    answer = timed("match", lambda: fleet.index.columns(request.reusable_hashes, ranks))
    verdict = timed("decide", lambda: state.decide(request, lambda *_: answer, now_s, _SEED))
    timed("record", lambda: writer.record(verdict))


def _cycled(prompts: Sequence[bytes], count: int) -> list[bytes]:
    return [prompts[number % len(prompts)] for number in range(count)]


def _at(times: dict[str, list[float]], quantile: float) -> dict[str, float]:
    return {stage: percentile(times[stage], quantile) for stage in STAGES}


def missed(cell: Timed) -> list[str]:
    """Return the targets that the cell misses; of another cell than theirs, none."""
    if cell.shape != _TARGET_SHAPE:
        return []
    found = {name: getattr(cell, f"{quantile}_us")[stage] for name in TARGETS_US for stage, quantile in [name.split()]}
    return [
        f"{name}: {found[name]:.0f} us, at most {most:.0f}" for name, most in TARGETS_US.items() if found[name] > most
    ]


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"found {value!r}, allowed whole numbers with commas between") from error


@click.command()
@click.option("--ranks", callback=_numbers, default="8,64,512", show_default=True, help="fleet sizes")
@click.option("--blocks", callback=_numbers, default="32,512,4096", show_default=True, help="full blocks of a prompt")
@click.option("--mode", type=click.Choice(sorted(MODES.keys() - {"direct"})), default="kv", show_default=True)
@click.option("--decisions", type=click.IntRange(min=10), default=1000, show_default=True, help="a cell")
@click.option("--json", "is_json", is_flag=True, help="print JSON and nothing else")
def decision(ranks: tuple[int, ...], blocks: tuple[int, ...], mode: str, decisions: int, *, is_json: bool) -> None:
    """Measure a decision from token ids to verdict, by stage: in this process, without a network.

    A fleet whose ranks hold parts of 64 prompts, and work on 12 requests each, is asked to place one request after
    another. The exit status is 1 where a target is missed: 64 ranks and 512 blocks.
    """
    cells = [measured(DecisionShape(of, at, mode), decisions) for of in ranks for at in blocks]
    misses = [miss for cell in cells for miss in missed(cell)]
    if is_json:
        click.echo(json.dumps({"machine": _where(), "misses": misses, "cells": [_as_json(each) for each in cells]}))
    else:
        _show(cells, misses)
    if misses:
        raise SystemExit(1)


def _requests(cells: Sequence[Timed]) -> Table:
    table = Table(title="a request after its prompt: us, p50 of each stage, mean CPU of all", title_justify="left")
    for name in ("ranks", "blocks", *REQUEST_STAGES, "cpu"):
        table.add_column(name, justify="right")
    for cell in cells:
        shape, found = cell.shape, cell.request
        if found is not None:
            times = [f"{found.p50_us[stage]:.1f}" for stage in REQUEST_STAGES]
            table.add_row(str(shape.ranks), str(shape.blocks), *times, f"{found.cpu_us:.1f}")
    return table


def _where() -> str:
    return machine_line()


def _as_json(cell: Timed) -> dict[str, Any]:
    request = None if cell.request is None else cell.request._asdict()
    quantiles = {"p50_us": cell.p50_us, "p99_us": cell.p99_us}
    return {**cell.shape._asdict(), "decisions": cell.decisions, **quantiles, "request": request}


def _show(cells: Sequence[Timed], misses: Sequence[str]) -> None:
    console = Console() if Console().is_terminal else Console(width=150)
    console.print(f"{cells[0].decisions} decisions a cell, block size {BLOCK_SIZE}. {_where()}", highlight=False)
    table = Table(title="us, p50 / p99", title_justify="left")
    for name in ("ranks", "blocks", *STAGES):
        table.add_column(name, justify="right")
    for cell in cells:
        times = [f"{cell.p50_us[stage]:.1f} / {cell.p99_us[stage]:.0f}" for stage in STAGES]
        table.add_row(str(cell.shape.ranks), str(cell.shape.blocks), *times)
    console.print(table)
    console.print(_requests(cells))
    for miss in misses:
        console.print(f"MISSED  {miss}", highlight=False)
