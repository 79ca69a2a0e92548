"""What the index bench measures: the cells, the seats of each, and the rounds.

    buffers, lists, messages  our index, by the form in which it gets hashes
    peer                      the peer's tree: events as JSON that was made before, queries as lists, answers as dicts
    floor                     the peer's tree, empty, with the same queries: the fixed cost of a call

A cell has several seats, each one of these; in a round every seat has its turn.

The schedule of a trace fixes the rank of each request and its evictions before the run. Each of some ranks has an LRU
cache of blocks. A request goes to the rank with the longest prefix of it (among equals, any), every `STRAY`-th on
average to any rank, so that prefixes are held by several. The prompt's blocks are then the rank's most recently used,
the last first: a block goes before its parent.

Figures stand in a table for each group of cells; targets, at scale 1:

trace      at least 10 times the peer with buffers, 6 times with lists
match      12 times the peer on a staircase of 512 with buffers; with lists 1.5 times in every cell
events     with buffers: stored 64 blocks 12 times the peer, 1 block 25 times; removed 64 blocks 8 times
memory     at most 0.45 of the peer's at one holder, 0.1 at 16
answers    all of the trace's right
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

from bench.index.subjects import CHAIN_BLOCKS, ScheduledRequest, chain, last, numbers, pack
from bench.prefix_tree import PrefixTree
from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from bench.tables import FigureTable, Rounds, Verdict, at_least, at_most, number, times

STRAY = 4


class ScheduleShape(NamedTuple):
    """How many ranks, and the tokens of one cache; a block is `block_size` tokens, which divides 512."""

    ranks: int = 16
    cache_tokens: int = 700_000
    block_size: int = 32
    seed: int = 1

    @property
    def cache_blocks(self) -> int:
        """The full blocks of one cache."""
        return self.cache_tokens // self.block_size


def schedule(trace: Sequence[TraceRequest], shape: ScheduleShape) -> Iterator[ScheduledRequest]:
    """Yield the requests of a schedule."""
    draw = random.Random(shape.seed)  # noqa: S311 - a workload, not a secret
    caches = [PrefixTree() for _ in range(shape.ranks)]
    for request in trace:
        if not (hashes := sequence_hashes(request, shape.block_size)):
            continue
        blocks = numbers(hashes)
        hits = [cache.depth(blocks) for cache in caches]
        longest = [rank for rank, hit in enumerate(hits) if hit == max(hits)]
        rank = draw.choice(longest) if draw.randrange(STRAY) else draw.randrange(shape.ranks)
        caches[rank].insert(blocks)
        yield ScheduledRequest(rank, hits[rank], hashes, pack(caches[rank].evict(shape.cache_blocks)))


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
"""Of the capacity that the ranks of a bulk cell register to the blocks that are stored there."""


class IndexCell(NamedTuple):
    """One measurement, in rounds that run every seat once; `in_own_process`: each in a fresh process."""

    name: str
    """It begins with that of its group."""
    work: str
    parameters: dict[str, Any]
    seats: tuple[str, ...]
    rounds: int
    in_own_process: bool = False


class IndexPlan(NamedTuple):
    """How much is measured. `scale` multiplies numbers of blocks and calls; `schedule` is a file, if there is one."""

    scale: float = 1.0
    rounds: int = 7
    is_huge: bool = False
    schedule: str | None = None
    shape: ScheduleShape = ScheduleShape()

    def blocks(self, count: int) -> int:
        """Return a number of blocks to scale, in full chains."""
        return max(CHAIN_BLOCKS, int(count * self.scale) // CHAIN_BLOCKS * CHAIN_BLOCKS)

    def calls(self, count: int) -> int:
        """Return a number of calls to scale."""
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
        shape = {"file": plan.schedule, "ranks": plan.shape.ranks, "cache_blocks": plan.shape.cache_blocks}
        yield IndexCell("trace", "trace", shape, (*OURS, "peer"), plan.rounds)
        yield IndexCell("trace, answers", "trace answers", shape, ("buffers", "peer"), 1)


def _memory(plan: IndexPlan) -> Iterator[IndexCell]:
    for holders in (1, 4, 16):
        parameters, seats = {"blocks": plan.blocks(1_000_000), "holders": holders}, ("buffers", "peer")
        yield IndexCell(f"memory, holders {holders}", "memory", parameters, seats, 1, in_own_process=True)


def _bulk(plan: IndexPlan) -> Iterator[IndexCell]:
    more = plan.blocks(1 << 19)
    for blocks, seats in ((10_000_000, ("buffers", "peer")), *([(HUGE_BLOCKS, ("buffers",))] if plan.is_huge else [])):
        held = plan.blocks(blocks)
        parameters = {"blocks": held, "capacity_blocks": int(CAPACITY_RATIO * (held + more))}
        parameters |= {"round_blocks": more, "calls": plan.calls(4000)}
        yield IndexCell(f"bulk, {held:,} blocks", "bulk", parameters, seats, 1, in_own_process=True)


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
"""Cells by their beginning, a figure, our seat, and at least how many times its time the peer needs."""


def tables(found: Rounds) -> list[FigureTable]:
    """Return a table for each group that was measured: medians by seat, and the peer's over ours with buffers."""
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
