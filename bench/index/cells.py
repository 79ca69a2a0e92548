"""The measured work, one class for each kind of cell. Standard library only: the peer's interpreter runs it too.

A cell is made once (its index filled, its queries made) and run a number of rounds. A round returns its figures by
name: a `Timing` (CPU and wall), or another number.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Protocol

from bench.index.clock import NOTHING, Timing, timed
from bench.index.data import CHAIN_BLOCKS, SIDE_BY_SIDE, ScheduledStore, chain, events, leaf_first
from bench.index.exact import SCENARIOS, scenario, storm
from bench.index.limits import compare_ns, pointer_chase_ns, random_rmw_ns
from bench.index.subjects import Call, IndexCall, Subject

RANKS = 16
FILL_SEED = 1
"""Rounds use other seeds."""
_RMW_OPERATIONS = 1 << 18
_WARM_UP_CHAINS = 32
WARM_UP_SEED = 1 << 32
"""Added to the seed of a round for its warm-up, which uses other blocks than the measurement."""
Found = dict[str, Timing | float]


class Work(Protocol):
    """One kind of measured work."""

    def round(self, seed: int) -> Found:
        """Return the figures of one round."""


class EventCell:
    """Fresh chains are stored in events of several sizes, in an index that holds others, and removed again.

    `sizes` are (blocks of an event, blocks of a round). Removed is in the same pieces, the last first, in chain order;
    with `is_leaf_first` the blocks of a piece come the leaf first, as a cache evicts.
    """

    def __init__(
        self, of: Subject, *, index_blocks: int, sizes: Sequence[Sequence[int]], is_leaf_first: bool = False
    ) -> None:
        self._of = of
        self._sizes = sizes
        self._order: Callable[[bytes], bytes] = leaf_first if is_leaf_first else bytes
        of.fresh(RANKS, -(-(index_blocks + max(blocks for _, blocks in sizes)) // RANKS))
        fill(of, range(index_blocks // CHAIN_BLOCKS))

    def round(self, seed: int) -> Found:
        """Return the time of storing and of removing, and the limit of a table as large as the index."""
        found: Found = {}
        for event_blocks, round_blocks in self._sizes:
            chains = range(round_blocks // CHAIN_BLOCKS)
            self._events(seed + WARM_UP_SEED, event_blocks, chains[:_WARM_UP_CHAINS])
            stored, removed = self._events(seed, event_blocks, chains)
            found |= {f"stored {event_blocks}": stored, f"removed {event_blocks}": removed}
        return found | random_rmw_ns(sum(self._of.memory().values()), _RMW_OPERATIONS, seed)

    def _events(self, seed: int, event_blocks: int, chains: range) -> tuple[Timing, Timing]:
        of, blocks = self._of, len(chains) * CHAIN_BLOCKS
        stored_events = list(events(seed, chains, event_blocks, RANKS))
        stores = of.bind([of.store(event) for event in stored_events])
        removes = of.bind([of.remove(event.rank, self._order(event.hashes)) for event in reversed(stored_events)])
        return timed(stores, blocks), timed(removes, blocks)


class MatchCell:
    """One prefix, matched repeatedly: all ranks hold it, or rank k holds k + 1 blocks of it, or no rank does."""

    def __init__(self, of: Subject, *, depth: int, holders: int, calls: int, held: str = "all") -> None:
        of.fresh(holders, depth)
        self._query = chain(FILL_SEED, 0, depth)
        for rank in range(holders):
            blocks = {"all": depth, "staircase": rank + 1, "none": 0}[held]
            if blocks:
                run(of, [of.store(ScheduledStore(rank, None, 0, self._query[: 8 * blocks]))])
        self._calls = of.bind([of.match(self._query)] * calls)

    def round(self, seed: int) -> Found:
        """Return the time of matching, and the limit: comparing the query's bytes."""
        del seed
        return {"match": hot(self._calls)} | compare_ns(len(self._query))


class NoEventCell:
    """An event without blocks is applied repeatedly: the fixed cost of an event."""

    def __init__(self, of: Subject, *, calls: int) -> None:
        of.fresh(1, 0)
        self._calls = of.bind([of.remove(0, b"")] * calls)

    def round(self, seed: int) -> Found:
        """Return the time of applying the event."""
        del seed
        return {"told": hot(self._calls)}


class ColdMatchCell:
    """Another prefix each time, out of an index of many."""

    def __init__(self, of: Subject, *, index_blocks: int, calls: int) -> None:
        self._of = of
        self._chains = range(index_blocks // CHAIN_BLOCKS)
        self._calls_count = min(calls, len(self._chains))
        of.fresh(RANKS, -(-index_blocks // RANKS))
        fill(of, self._chains)

    def round(self, seed: int) -> Found:
        """Return the time of matching."""
        return {"match": cold_matches(self._of, self._chains, self._calls_count, seed)}


class HashCell:
    """The blocks of one prompt are hashed: from a buffer by the extension, from a list in Python, or by the peer."""

    def __init__(self, name: str, shape: str, *, tokens: int, block_size: int, calls: int) -> None:
        prompt = list(range(tokens))
        if name == "peer":  # only local hashes, without the chain
            call = partial(import_module("dynamo._core").compute_block_hash_for_seq, prompt, block_size)
        elif shape == "buffers":
            packed = array("I", prompt).tobytes()
            call = partial(import_module("indexer.native.block_hashes").hash_blocks, packed, block_size)
        else:
            call = partial(import_module("kv_protocol.hashing").sequence_hashes, prompt, block_size)
        self._calls = [call] * calls

    def round(self, seed: int) -> Found:
        """Return the time of a prompt."""
        del seed
        return {"hash": hot(self._calls)}


class LimitCell:
    """A limit of the machine at one size (see `limits.py`), or an empty call in the bench's loop."""

    def __init__(self, *, kind: str, size_bytes: int, operations: int) -> None:
        self._kind = kind
        self._size_bytes = size_bytes
        self._operations = operations

    def round(self, seed: int) -> Found:
        """Return ns of one operation; nothing where the extension was not built."""
        if self._kind == "empty call":
            return {"limit": timed([partial(len, b"")] * self._operations, self._operations)}
        if self._kind == "compare":
            return {**compare_ns(self._size_bytes)}
        measure = random_rmw_ns if self._kind == "random_rmw" else pointer_chase_ns
        return {**measure(self._size_bytes, self._operations, seed)}


class ExactCell:
    """One scenario, or a storm of random events (`name`: orderly or disorderly); no time is measured."""

    def __init__(self, of: Subject, *, name: str) -> None:
        self._of = of
        self._name = name

    def round(self, seed: int) -> Found:
        """Return the answer, and how many events were not accepted."""
        return {**(scenario(self._of, self._name) if self._name in SCENARIOS else storm(self._of, seed, self._name))}


def hot(calls: Sequence[Call]) -> Timing:
    """Return the time of calls that are all the same, once they are warm."""
    timed(calls[: len(calls) // 10], 0)
    return timed(calls, len(calls))


def cold_matches(of: Subject, chains: range, calls: int, seed: int) -> Timing:
    """Return the time of `calls` matches of different chains, in random order; queries are made before."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    steps = [of.match(chain(FILL_SEED, number)) for number in draw.sample(chains, calls)]
    return timed(of.bind(steps), calls)


def fill(of: Subject, chains: range) -> Timing:
    """Return the time of storing chains, each as one event; events are made a few at a time, outside of the clock."""
    total = NOTHING
    for first in range(0, len(chains), SIDE_BY_SIDE):
        steps = [
            of.store(event) for event in events(FILL_SEED, chains[first : first + SIDE_BY_SIDE], CHAIN_BLOCKS, RANKS)
        ]
        total = total.plus(timed(of.bind(steps), len(steps) * CHAIN_BLOCKS))
    return total


def run(of: Subject, steps: Iterable[IndexCall]) -> None:
    """Do all steps."""
    for call in of.bind(steps):
        call()
