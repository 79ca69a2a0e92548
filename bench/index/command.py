"""`router bench index`: the index beside the strongest peer, in processes on one core, in turns.

A cell is one measurement, with several seats. Each seat of each cell is a process of its own; only one process works at
a time. A round is one turn of each seat, so that a disturbance of the machine affects all of them. A seat is one of:

    buffers, lists, messages  our index, by the form in which it gets hashes
    peer                      the peer's tree: events as JSON that was made before, queries as lists, answers as dicts
    floor                     the peer's tree, empty, with the same queries: the fixed cost of a call

The schedule of a trace fixes the rank of each request and its evictions before the run. Each of some ranks has an LRU
cache of blocks. A request goes to the rank with the longest prefix of it (among equals, any), every `STRAY`-th on
average to any rank, so that prefixes are held by several. The prompt's blocks are then the rank's most recently used; a
block is evicted before its parent.

Figures stand in a table for each group of cells. The targets at scale 1, in multiples of the peer's speed:

trace      at least 10 times with buffers, 6 times with lists
match      with buffers at least 12 times if rank k of 512 holds k + 1 blocks; with lists 1.5 times in every cell
events     with buffers at least: stored 64 blocks 12 times, 1 block 25 times; removed 64 blocks 8 times
memory     at most 0.45 of the peer's bytes at one holder, 0.1 at 16
answers    all answers of the trace are right
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

from bench.child import BenchFailed, Child, finished
from bench.index.cells import RANKS
from bench.index.subjects import CHAIN_BLOCKS, ScheduledRequest, chain, last, numbers, pack, write_requests
from bench.routing.trace import TRACE_BLOCK_TOKENS, PrefixTree, TraceInvalid, TraceRequest, load_trace
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
    times,
    verdict_table,
)
from kv_runtime.process import child_environment

STRAY, CACHE_TOKENS = 4, 700_000
_SCHEDULE_SEED = 1


def schedule(trace: Sequence[TraceRequest], block_size: int) -> Iterator[ScheduledRequest]:
    """Yield the requests of a schedule; a block is `block_size` tokens, which must divide 512."""
    draw = random.Random(_SCHEDULE_SEED)  # noqa: S311 - a workload, not a secret
    caches = [PrefixTree() for _ in range(RANKS)]
    for request in trace:
        if not (hashes := sequence_hashes(request, block_size)):
            continue
        blocks = numbers(hashes)
        hits = [cache.depth(blocks) for cache in caches]
        longest = [rank for rank, hit in enumerate(hits) if hit == max(hits)]
        rank = draw.choice(longest) if draw.randrange(STRAY) else draw.randrange(RANKS)
        caches[rank].insert(blocks)
        yield ScheduledRequest(rank, hits[rank], hashes, pack(caches[rank].evict(CACHE_TOKENS // block_size)))


def sequence_hashes(request: TraceRequest, block_size: int) -> bytes:
    """Return a hash of every full block, equal for equal prefixes."""
    hashes: list[bytes] = []
    parent = 0
    for block_id in islice(request.block_ids, -(-request.isl_tokens // TRACE_BLOCK_TOKENS)):
        hashes.append(chain(parent, block_id, TRACE_BLOCK_TOKENS // block_size))
        parent = last(hashes[-1])
    return b"".join(hashes)[: 8 * (request.isl_tokens // block_size)]


OURS = ("buffers", "lists", "messages")
DEPTHS, HOLDERS = (32, 512, 2048), (1, 16, 512)
STAIRS = 512
HUGE_BLOCKS = 100_000_000
LARGE_BLOCKS = 1 << 21
CAPACITY_RATIO = 1.25
"""The capacity that the ranks of a bulk cell register, as a multiple of the stored blocks."""


class IndexCell(NamedTuple):
    """One measurement, in rounds that run every seat once."""

    name: str
    """It begins with the name of its group."""
    work: str
    parameters: dict[str, Any]
    seats: tuple[str, ...]
    rounds: int


class IndexPlan(NamedTuple):
    """How much is measured. `scale` multiplies numbers of blocks and calls.

    `schedule` has the parameters of the cells of a trace; None: there is no trace.
    """

    scale: float = 1.0
    rounds: int = 7
    is_huge: bool = False
    schedule: dict[str, Any] | None = None

    def blocks(self, count: int) -> int:
        """Return a number of blocks at this scale, in full chains."""
        return max(CHAIN_BLOCKS, int(count * self.scale) // CHAIN_BLOCKS * CHAIN_BLOCKS)

    def calls(self, count: int) -> int:
        """Return a number of calls at this scale."""
        return max(10, int(count * self.scale))


def _events(plan: IndexPlan) -> Iterator[IndexCell]:
    for name, index_blocks, round_blocks in (("small index", 1 << 14, 1 << 14), ("large index", LARGE_BLOCKS, 1 << 18)):
        sizes = [(1, plan.blocks(1 << 14)), *((size, plan.blocks(round_blocks)) for size in (8, 64, 512))]
        parameters = {"index_blocks": plan.blocks(index_blocks), "sizes": sizes}
        yield IndexCell(f"events, {name}", "events", parameters, (*OURS, "peer"), plan.rounds)


def _match(plan: IndexPlan) -> Iterator[IndexCell]:
    seats, calls = ("buffers", "lists", "peer", "floor"), {"calls": plan.calls(1000)}
    for depth, holders in product(DEPTHS, HOLDERS):
        parameters = {"depth": depth, "holders": holders, **calls}
        yield IndexCell(f"match, depth {depth}, holders {holders}", "match", parameters, seats, plan.rounds)
    stairs = {"depth": STAIRS, "holders": STAIRS, "held": "staircase", **calls}
    yield IndexCell(f"match, staircase of {STAIRS}", "match", stairs, seats, plan.rounds)
    cold = {"index_blocks": plan.blocks(LARGE_BLOCKS), **calls}
    yield IndexCell(f"match, depth {CHAIN_BLOCKS}, cold", "cold match", cold, seats[:3], plan.rounds)


def _trace(plan: IndexPlan) -> Iterator[IndexCell]:
    if plan.schedule is not None:
        yield IndexCell("trace", "trace", plan.schedule, (*OURS, "peer"), plan.rounds)
        yield IndexCell("trace, answers", "trace answers", plan.schedule, ("buffers", "peer"), 1)


def _memory(plan: IndexPlan) -> Iterator[IndexCell]:
    for holders in (1, 4, 16):
        parameters, seats = {"blocks": plan.blocks(1_000_000), "holders": holders}, ("buffers", "peer")
        yield IndexCell(f"memory, holders {holders}", "memory", parameters, seats, 1)


def _bulk(plan: IndexPlan) -> Iterator[IndexCell]:
    more = plan.blocks(1 << 19)
    for blocks, seats in ((10_000_000, ("buffers", "peer")), *([(HUGE_BLOCKS, ("buffers",))] if plan.is_huge else [])):
        held = plan.blocks(blocks)
        parameters = {"blocks": held, "capacity_blocks": int(CAPACITY_RATIO * (held + more))}
        parameters |= {"round_blocks": more, "calls": plan.calls(4000)}
        yield IndexCell(f"bulk, {held:,} blocks", "bulk", parameters, seats, 1)


_MAKERS: dict[str, Callable[[IndexPlan], Iterator[IndexCell]]] = {
    "events": _events,
    "match": _match,
    "trace": _trace,
    "memory": _memory,
    "bulk": _bulk,
}
GROUPS = tuple(_MAKERS)


def cells(plan: IndexPlan, only: tuple[str, ...] = GROUPS) -> list[IndexCell]:
    """Return the cells of some groups, in the order of `GROUPS`."""
    return [cell for group in GROUPS if group in only for cell in _MAKERS[group](plan)]


_SEATS = (*OURS, "peer", "floor")
_UNITS = {
    "events": "CPU ns a block",
    "match": "CPU ns",
    "trace": "CPU ns a block",
    "memory": "bytes a unique block",
    "bulk": "CPU ns, bytes a block",
}
_TARGETS = (
    ("trace", "trace", "buffers", 10.0),
    ("trace", "trace", "lists", 6.0),
    ("match, staircase", "match", "buffers", 12.0),
    ("match", "match", "lists", 1.5),
    ("events", "stored 64", "buffers", 12.0),
    ("events", "stored 1", "buffers", 25.0),
    ("events", "removed 64", "buffers", 8.0),
)
"""How the cells' names begin, a figure, our seat, and the least ratio of the peer's time to ours."""


def tables(found: Rounds) -> list[FigureTable]:
    """Return a table for each group that was measured: medians by seat, and the peer's over ours."""
    groups = [group for group in GROUPS if found.cells(group)]
    columns = ("cell", "figure", *_SEATS, "peer / buffers", "peer / lists")
    return [FigureTable(f"{group}, {_UNITS[group]}", columns, list(_rows(found, group))) for group in groups]


def _rows(found: Rounds, group: str) -> Iterator[tuple[str, ...]]:
    for cell in found.cells(group):
        for name in dict.fromkeys(
            name for seat in _SEATS for each in found.rounds.get((seat, cell), ()) for name in each
        ):
            ratios = (times(found.ratio(cell, name, "peer", seat)) for seat in OURS[:2])
            yield (cell, name, *(number(found.figure(seat, cell, name)) for seat in _SEATS), *ratios)


def verdicts(found: Rounds) -> list[Verdict]:
    """Return the verdict on every target."""
    judged = [
        at_least(
            f"{beginning}, {name}, {seat}: the peer's time over ours",
            needed,
            [(cell, found.ratio(cell, name, "peer", seat)) for cell in found.cells(beginning)],
        )
        for beginning, name, seat, needed in _TARGETS
    ]
    for cell, most in (("memory, holders 1", 0.45), ("memory, holders 16", 0.1)):
        judged.append(
            at_most(f"{cell}: ours over the peer's", most, [("", found.ratio(cell, "resident", "buffers", "peer"))])
        )
    answers = [
        (f"{cell} ({seat})", found.figure(seat, cell, "wrong"))
        for cell in found.cells("trace, answers")
        for seat in OURS
    ]
    return [*judged, at_most("wrong answers", 0, answers, "")]


_ROOT = Path(__file__).parents[2]
_SEED = 1000
"""The seed of the first round."""


class Runner:
    """Measures cells on one core (-1: on any), the peer with an interpreter of its own."""

    def __init__(self, peer_python: str, core: int) -> None:
        self._peer_python, self._core = peer_python, core
        self.peer = ""
        """The peer's version, or why it is not measured."""

    async def run(self, cells: Sequence[IndexCell], on_progress: Callable[[str], None]) -> Rounds:
        """Return the figures of all cells by seat; `on_progress` gets the name of each cell once it is measured.

        Raises:
            BenchFailed: a process ended, or failed a request, or our own index is not there.
        """
        results = Rounds()
        for cell in cells:
            async with AsyncExitStack() as ending:
                seats = dict[str, Child]()
                for seat in cell.seats:
                    if (child := await self._started(cell, seat)) is not None:
                        ending.push_async_callback(child.close)
                        seats[seat] = child
                for at in range(cell.rounds):
                    for seat, child in seats.items():
                        results.add(seat, cell.name, await child.call("round", seed=_SEED + at))
            on_progress(cell.name)
        return results

    async def _started(self, cell: IndexCell, seat: str) -> Child | None:
        """Return a process that has made the cell; None if the peer is absent."""
        is_ours = seat in OURS
        python = sys.executable if is_ours else self._peer_python
        arguments = {
            "subject": "native" if is_ours else "peer",
            "core": self._core,
            "work": cell.work,
            "shape": seat,
            "parameters": cell.parameters | ({"held": "none"} if seat == "floor" else {}),
        }
        environment = {**child_environment(), "PYTHONPATH": str(_ROOT), "DYN_LOG": "error"}
        try:
            child = await Child.start(
                "bench.index.cells", arguments, python=python, environment=environment, answer_s=None
            )
        except OSError as error:
            absent = f"{python}: {error.strerror}"
        else:
            if "absent" not in child.started:
                self.peer = child.started["version"] or self.peer
                return child
            absent = child.started["absent"]
            await child.close()
        if is_ours:
            raise BenchFailed(absent)
        self.peer = f"absent ({absent})"
        return None


PEER_PYTHON = "KVROUTER_BENCH_PEER_PYTHON"
_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
_SCALE_JUDGED = 1.0
_QUICK_SCALE, _QUICK_ROUNDS = 0.02, 2
_CORE = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1
"""The last core that this process may use; -1 if the system gives no choice."""
_SIZES = tuple(str(1 << power) for power in range(4, 10))  # 16..512: divisors of a trace's block


@click.command("index", context_settings={"show_default": True})
@click.option("--peer-python", envvar=PEER_PYTHON, help=f"an interpreter with ai-dynamo-runtime; also ${PEER_PYTHON}")
@click.option("--only", callback=names_of(GROUPS), default=",".join(GROUPS), help="groups of cells")
@click.option("--rounds", type=click.IntRange(min=1), default=7, help="turns of every seat; medians are shown")
@click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, help="factor on blocks and calls")
@click.option("--quick", is_flag=True, help=f"--scale {_QUICK_SCALE} --rounds {_QUICK_ROUNDS}: does it run at all")
@click.option("--huge", is_flag=True, help="also an index of 1e8 blocks")
@click.option("--core", type=int, default=_CORE, help="all is measured on this one; -1: on any")
@click.option(
    "--trace",
    "file",
    type=click.Path(path_type=Path),
    default=_TRACE,
    show_default=f"{_TRACE.name} in shared/traces, beside the checkout",
    help="JSON lines in the form of the Mooncake traces; without them there is no replay",
)
@click.option("--requests", "requests_max", type=click.IntRange(min=1), help="how many requests of the trace")
@click.option("--block-size", type=click.Choice(_SIZES), default="32", help="tokens of a block of the trace")
@report_options
def index(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure the index: events, matches, a trace and its answers, memory; beside the peer.

    Each index runs in a process of its own, all pinned to one core, in turns; CPU times, medians of rounds. The peer is
    the radix tree of ai-dynamo-runtime, through Python; it is no dependency: name an interpreter that has it. Its floor
    is the same call on an empty tree. Ranks register their capacity, as in the service, except to measure memory. At
    the end stands what the targets ask for at scale 1, reached or missed. The exit status says whether the bench ran.
    """
    with TemporaryDirectory() as directory:
        plan, trace_line = _plan(flags, Path(directory) / "schedule")
        selected = cells(plan, flags["only"])
        runner = Runner(flags["peer_python"] or sys.executable, flags["core"])
        with progress(len(selected)) as on_progress:
            found = finished(runner.run(selected, on_progress))
    facts = [
        f"all on core {flags['core']}; peer: ai-dynamo-runtime {runner.peer}",
        f"medians of {plan.rounds} rounds, scale {plan.scale:g}; trace: {trace_line}",
    ]
    made = [*tables(found), *([verdict_table(verdicts(found))] if plan.scale == _SCALE_JUDGED else [])]
    report(facts, made, {"peer": runner.peer, "cells": found.plain()}, flags["json_file"], flags["markdown"])


def _plan(flags: dict[str, Any], written: Path) -> tuple[IndexPlan, str]:
    """Return the plan, and a line about the trace."""
    is_quick = flags["quick"]
    plan = IndexPlan(
        scale=_QUICK_SCALE if is_quick else flags["scale"],
        rounds=_QUICK_ROUNDS if is_quick else flags["rounds"],
        is_huge=flags["huge"],
    )
    if "trace" not in flags["only"]:
        return plan, "not asked for"
    file: Path = flags["file"]
    try:
        requests = load_trace(file, flags["requests_max"])
    except OSError as error:
        return plan, f"skipped ({file}: {error.strerror})"
    except TraceInvalid as error:
        raise click.ClickException(str(error)) from error
    block_size = int(flags["block_size"])
    cache_blocks = CACHE_TOKENS // block_size
    count = write_requests(written, schedule(requests, block_size))
    line = f"{file.name}, {count:,} requests, {RANKS} ranks, {cache_blocks:,} blocks of {block_size} tokens each"
    return plan._replace(schedule={"file": str(written), "ranks": RANKS, "cache_blocks": cache_blocks}), line
