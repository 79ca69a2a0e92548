"""What the index bench measures: the cells, the seats of each, and the rounds.

    buffers, lists, messages  our index, by the form in which it gets hashes
    peer                      the peer's tree: events as JSON that was made before, queries as lists, answers as dicts
    floor                     the peer's tree, empty, with the same queries: the fixed cost of a call
    twin                      our index again, in another process: the noise of the bench itself
    machine                   what the extension measures of the machine

A cell has several seats, each one of these; in a round every seat has its turn.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from bench.index.data import CHAIN_BLOCKS
from bench.index.exact import SCENARIOS
from bench.index.schedule import ScheduleShape

GROUPS = ("events", "match", "cold", "trace", "memory", "bulk", "exact", "hash", "machine", "control")
EVENT_BLOCKS = (1, 8, 64, 512)
DEPTHS, HOLDERS = (32, 512, 2048), (1, 16, 512)
STAIRS = 512
MEMORY_HOLDERS = (1, 4, 16)
TOKENS, BLOCK_SIZE = 8192, 64
STORMS = ("orderly", "disorderly")
HUGE_BLOCKS = 100_000_000
LARGE_BLOCKS = 1 << 21
CAPACITY_RATIO = 1.25
"""Of the capacity that the ranks of a bulk cell register to the blocks that are stored there."""
UNSIZED = "without a capacity"
"""Ends the name of a cell whose ranks register none, so that the index grows under what is stored."""
UNSIZED_ROUNDS = 3
"""Each costs a process; what memory costs when it is touched first varies from one to the next."""


class Seat(NamedTuple):
    """A participant of a cell: a process, the form of its hashes, and its changes to the cell's parameters."""

    process: str
    shape: str
    changes: tuple[tuple[str, Any], ...] = ()


SEATS = {
    "buffers": Seat("ours", "buffers"),
    "lists": Seat("ours", "lists"),
    "messages": Seat("ours", "messages"),
    "peer": Seat("peer", "json"),
    "floor": Seat("peer", "json", (("held", "none"),)),
    "twin": Seat("twin", "buffers"),
    "machine": Seat("ours", "machine"),
}
OURS = ("buffers", "lists", "messages")


class IndexCell(NamedTuple):
    """One measurement, in rounds that run every seat once; `in_own_process`: each in a fresh process."""

    group: str
    name: str
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


def cells(plan: IndexPlan, only: tuple[str, ...] = GROUPS) -> list[IndexCell]:
    """Return the cells of some groups, in the order of `GROUPS`."""
    return [cell for group in GROUPS if group in only for cell in _MAKERS[group](plan)]


def _events(plan: IndexPlan) -> Iterator[IndexCell]:
    def cell(name: str, index_blocks: int, sizes: list[tuple[int, int]], **more: bool) -> IndexCell:
        scaled_sizes = [(event_blocks, plan.blocks(blocks)) for event_blocks, blocks in sizes]
        parameters = {"index_blocks": plan.blocks(index_blocks), "sizes": scaled_sizes, **more}
        return IndexCell("events", name, "events", parameters, (*OURS, "peer"), plan.rounds)

    yield cell("small index", 1 << 14, [(size, 1 << 14) for size in EVENT_BLOCKS])
    yield cell("large index", LARGE_BLOCKS, [(1, 1 << 14), (8, 1 << 16), (64, 1 << 18), (512, 1 << 19)])
    yield cell("large index, leaf first", LARGE_BLOCKS, [(64, 1 << 18), (512, 1 << 18)], is_leaf_first=True)


def _match(plan: IndexPlan) -> Iterator[IndexCell]:
    seats = ("buffers", "lists", "peer", "floor")
    for depth, holders in product(DEPTHS, HOLDERS):
        parameters = {"depth": depth, "holders": holders, "calls": plan.calls(1000)}
        yield IndexCell("match", f"depth {depth}, {_holders_text(holders)}", "match", parameters, seats, plan.rounds)
    stairs = {"depth": STAIRS, "holders": STAIRS, "calls": plan.calls(1000), "held": "staircase"}
    yield IndexCell("match", f"staircase of {STAIRS}", "match", stairs, seats, plan.rounds)


def _cold(plan: IndexPlan) -> Iterator[IndexCell]:
    parameters = {"index_blocks": plan.blocks(LARGE_BLOCKS), "calls": plan.calls(1000)}
    yield IndexCell(
        "cold", f"depth {CHAIN_BLOCKS}, cold", "cold match", parameters, ("buffers", "lists", "peer"), plan.rounds
    )


def _trace(plan: IndexPlan) -> Iterator[IndexCell]:
    if plan.schedule is None:
        return
    shape = {"file": plan.schedule, "ranks": plan.shape.ranks, "cache_blocks": plan.shape.cache_blocks}
    yield IndexCell("trace", "trace", "trace", shape, (*OURS, "peer", "floor"), plan.rounds)
    yield IndexCell("trace", "trace answers", "trace answers", shape, ("buffers", "peer"), 1)


def _memory(plan: IndexPlan) -> Iterator[IndexCell]:
    for holders in MEMORY_HOLDERS:
        parameters = {"blocks": plan.blocks(1_000_000), "holders": holders}
        yield IndexCell(
            "memory", _holders_text(holders), "memory", parameters, ("buffers", "peer"), 1, in_own_process=True
        )


def _bulk(plan: IndexPlan) -> Iterator[IndexCell]:
    more = plan.blocks(1 << 19)

    def bulk_parameters(blocks: int, capacity_blocks: int) -> dict[str, int]:
        round_parameters = {"round_blocks": more, "calls": plan.calls(4000)}
        return {"blocks": blocks, "capacity_blocks": capacity_blocks} | round_parameters

    def sized(blocks: int, seats: tuple[str, ...]) -> IndexCell:
        parameters = bulk_parameters(blocks, int(CAPACITY_RATIO * (blocks + more)))
        return IndexCell("bulk", f"{blocks:,} blocks", "bulk", parameters, seats, 1, in_own_process=True)

    large = plan.blocks(LARGE_BLOCKS)
    name = f"{large:,} blocks, {UNSIZED}"
    yield IndexCell("bulk", name, "bulk", bulk_parameters(large, 0), ("buffers",), UNSIZED_ROUNDS, in_own_process=True)
    yield sized(plan.blocks(10_000_000), ("buffers", "peer"))
    if plan.is_huge:
        yield sized(HUGE_BLOCKS, ("buffers",))


def _exact(plan: IndexPlan) -> Iterator[IndexCell]:
    del plan
    for name in SCENARIOS:
        yield IndexCell("exact", name, "exact", {"name": name}, ("buffers", "messages", "peer"), 1)
    for name in STORMS:
        yield IndexCell("exact", name, "exact", {"name": name}, ("buffers", "messages", "peer"), 3)


def _hash(plan: IndexPlan) -> Iterator[IndexCell]:
    parameters = {"tokens": TOKENS, "block_size": BLOCK_SIZE, "calls": plan.calls(500)}
    yield IndexCell("hash", f"{TOKENS} tokens", "hash", parameters, ("buffers", "lists", "peer"), plan.rounds)


def _machine(plan: IndexPlan) -> Iterator[IndexCell]:
    def cell(name: str, kind: str, size_bytes: int) -> IndexCell:
        parameters = {"kind": kind, "size_bytes": size_bytes, "operations": plan.calls(1 << 20)}
        return IndexCell("machine", name, "limit", parameters, ("machine",), plan.rounds)

    yield cell("empty call", "empty call", 0)
    sizes_mib = list(dict.fromkeys(max(1, int(size_mib * plan.scale)) for size_mib in (1, 64, 1024)))
    for size_mib in sizes_mib:
        yield cell(f"random read-modify-write, {size_mib} MiB", "random_rmw", size_mib << 20)
    yield cell(f"dependent read, {sizes_mib[-1]} MiB", "pointer_chase", sizes_mib[-1] << 20)
    for depth in DEPTHS:
        yield cell(f"compare {depth} hashes", "compare", 8 * depth)


def _control(plan: IndexPlan) -> Iterator[IndexCell]:
    parameters = {"depth": STAIRS, "holders": 16, "calls": plan.calls(1000)}
    yield IndexCell("control", "the same index twice", "match", parameters, ("buffers", "twin"), plan.rounds)
    no_holder = {"depth": 1, "holders": 1, "calls": plan.calls(1000), "held": "none"}
    yield IndexCell(
        "control", "one block that no rank has", "match", no_holder, ("buffers", "lists", "peer"), plan.rounds
    )
    nothing = {"calls": plan.calls(1000)}
    yield IndexCell(
        "control", "an event without blocks", "no event", nothing, ("buffers", "lists", "peer"), plan.rounds
    )


def _holders_text(holders: int) -> str:
    return f"{holders} holder{'s' if holders > 1 else ''}"


_MAKERS: dict[str, Callable[[IndexPlan], Iterator[IndexCell]]] = {
    "events": _events,
    "match": _match,
    "cold": _cold,
    "trace": _trace,
    "memory": _memory,
    "bulk": _bulk,
    "exact": _exact,
    "hash": _hash,
    "machine": _machine,
    "control": _control,
}
