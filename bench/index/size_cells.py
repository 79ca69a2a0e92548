"""The memory of blocks, and an index of very many. Standard library only. Each cell runs in its own process."""

from bench.index.cells import RANKS, WARM_UP_SEED, Found, cold_matches, fill, run
from bench.index.clock import timed
from bench.index.data import CHAIN_BLOCKS, SIDE_BY_SIDE, ScheduledStore, events
from bench.index.limits import random_rmw_ns, resident_bytes
from bench.index.subjects import IndexCall, Subject


class MemoryCell:
    """The same blocks are held by so many ranks, which registered no capacity."""

    def __init__(self, of: Subject, *, blocks: int, holders: int) -> None:
        self._of = of
        self._chains = range(blocks // CHAIN_BLOCKS)
        self._holders = holders

    def round(self, seed: int) -> Found:
        """Return bytes a unique block: resident memory, and as the index reports (0: not reported)."""
        of, chains = self._of, self._chains
        before_bytes = resident_bytes()
        of.fresh(self._holders, 0)
        for first in range(0, len(chains), SIDE_BY_SIDE):
            self._store(list(events(seed, chains[first : first + SIDE_BY_SIDE], CHAIN_BLOCKS, 1)))
        blocks = len(chains) * CHAIN_BLOCKS
        resident = (resident_bytes() - before_bytes) / blocks if before_bytes else 0.0
        return {"resident": resident, "told": sum(of.memory().values()) / blocks}

    def _store(self, events_: list[ScheduledStore]) -> None:
        of = self._of
        steps = [of.store(event) for event in events_]
        for rank in range(self._holders):  # the rank is the first argument of a step; the other arguments are shared
            for call in of.bind(IndexCall(step.name, (rank, *step.arguments[1:])) for step in steps):
                call()


class BulkCell:
    """A large index is built, queried, and gets more blocks; its ranks register `capacity_blocks` in all.

    Where they do, as many other blocks are stored and removed again before: memory that is touched for the first time
    may cost more than storing does. Where they register none, the cell measures growth.
    """

    def __init__(self, of: Subject, *, blocks: int, capacity_blocks: int, calls: int, round_blocks: int) -> None:
        self._of = of
        self._chains = range(blocks // CHAIN_BLOCKS)
        self._capacity_blocks = capacity_blocks
        self._calls = min(calls, len(self._chains))
        self._more = range(round_blocks // CHAIN_BLOCKS)

    def round(self, seed: int) -> Found:
        """Return the time of building, of cold matches and of more, the limit for its size, and bytes a block."""
        of, chains = self._of, self._chains
        blocks = len(chains) * CHAIN_BLOCKS
        before_bytes = resident_bytes()
        of.fresh(RANKS, -(-self._capacity_blocks // RANKS))
        found: Found = {"build": fill(of, chains)}
        found["resident"] = (resident_bytes() - before_bytes) / blocks if before_bytes else 0.0
        index_bytes = sum(of.memory().values())
        found["told"] = index_bytes / blocks
        found["match"] = cold_matches(of, chains, self._calls, seed)
        if self._capacity_blocks:
            self._store_and_remove(seed + WARM_UP_SEED)
        more = of.bind([of.store(event) for event in events(seed, self._more, CHAIN_BLOCKS, RANKS)])
        found["stored"] = timed(more, len(more) * CHAIN_BLOCKS)
        return found | random_rmw_ns(index_bytes, len(more) * CHAIN_BLOCKS, seed)

    def _store_and_remove(self, seed: int) -> None:
        stored_events = list(events(seed, self._more, CHAIN_BLOCKS, RANKS))
        run(self._of, [self._of.store(event) for event in stored_events])
        run(self._of, [self._of.remove(event.rank, event.hashes) for event in stored_events])
