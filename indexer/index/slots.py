"""Slots, which are the small numbers of worker ranks in an index, and refused ranks.

A rank gets the lowest free slot. A refused rank is listed with the reason until it gets a slot, its worker leaves, or
no message comes from it for a time. The list is bounded: unknown ranks, however many, take little memory.

A worker's reported capacity is passed to the index for each of its ranks, whether report or rank comes first, so that
memory is allocated before blocks come. Only the capacities of the `RANKS_MAX` newest workers are stored.
"""

from typing import NamedTuple

from indexer.index.prefix_index import RANKS_MAX, IndexFull, PrefixIndex
from kv_protocol.events import U32_LIMIT
from kv_protocol.ids import WorkerRank

REFUSED_NAMED_MAX = 256


class _Refused(NamedTuple):
    reason: str
    last_seen_s: float


class _Registration(NamedTuple):
    capacity_blocks: int = 0
    instance: str = ""


class RankSlots:
    """The slots of one index; registers and drops ranks there."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.rank_of: dict[int, WorkerRank] = {}
        """The rank of each slot that is not free."""
        self._free: set[int] = set()
        self._registrations: dict[str, _Registration] = {}
        self._refused: dict[WorkerRank, _Refused] = {}
        self.refused_total = 0
        """How often a rank was refused."""

    def take(self, rank: WorkerRank, now_s: float) -> int | None:
        """Return a slot for a new rank; None if it is refused."""
        slot = min(self._free, default=len(self.rank_of))
        if slot == RANKS_MAX:
            self._refuse(rank, f"{RANKS_MAX} ranks are known already", now_s)
            return None
        try:
            self._index.register(slot, self._capacity_blocks(rank.worker_id))
        except IndexFull as error:
            self._refuse(rank, str(error), now_s)
            return None
        self._free.discard(slot)
        self._refused.pop(rank, None)
        self.rank_of[slot] = rank
        return slot

    def _refuse(self, rank: WorkerRank, reason: str, now_s: float) -> None:
        self.refused_total += 1
        if rank in self._refused or len(self._refused) < REFUSED_NAMED_MAX:
            self._refused[rank] = _Refused(reason, now_s)

    def give_back(self, slot: int) -> None:
        """Drop the slot's rank from the index and free the slot."""
        self._index.drop(slot)
        del self.rank_of[slot]
        self._free.add(slot)

    def assign(self, rank_of: dict[int, WorkerRank]) -> None:
        """Assign exactly these slots; their ranks keep the index's blocks, all other slots are dropped."""
        self.rank_of.clear()
        self.rank_of.update(sorted(rank_of.items()))
        self._free = set(range(max(rank_of, default=-1) + 1)) - rank_of.keys()
        self._refused.clear()
        for slot in range(RANKS_MAX):
            if slot in rank_of:
                self._index.register(slot, self._capacity_blocks(rank_of[slot].worker_id))
            else:
                self._index.drop(slot)

    def _capacity_blocks(self, worker_id: str) -> int:
        return self._registrations.get(worker_id, _Registration()).capacity_blocks

    def set_capacity(self, worker_id: str, capacity_blocks: int, instance: str = "") -> None:
        """Reserve memory, if there is any, for this many blocks of each present and later rank of the worker."""
        self._registrations.pop(worker_id, None)
        if len(self._registrations) == RANKS_MAX:
            del self._registrations[next(iter(self._registrations))]
        capacity_blocks = min(capacity_blocks, U32_LIMIT - 1)
        self._registrations[worker_id] = _Registration(capacity_blocks, instance)
        for slot, rank in self.rank_of.items():
            if rank.worker_id == worker_id:
                self._index.register(slot, capacity_blocks)

    def refused(self) -> dict[WorkerRank, str]:
        """Return the listed refused ranks, and why."""
        return {rank: refused.reason for rank, refused in self._refused.items()}

    def is_refused(self, rank: WorkerRank) -> bool:
        """Return whether the rank is a listed refused rank."""
        return rank in self._refused

    def restart_refused_timeouts(self, now_s: float) -> None:
        """Nothing could be received until now: restart the timeouts of refused ranks."""
        self._refused = {rank: refused._replace(last_seen_s=now_s) for rank, refused in self._refused.items()}

    def forget_silent(self, since_s: float) -> None:
        """Remove refused ranks from which no message came after `since_s`."""
        for rank in [rank for rank, refused in self._refused.items() if refused.last_seen_s <= since_s]:
            del self._refused[rank]

    def forget_worker(self, worker_id: str, instance: str) -> None:
        """Forget the worker's refused ranks and capacity, unless another instance than the named one has registered."""
        if instance and self._registrations.get(worker_id, _Registration()).instance not in ("", instance):
            return
        self._registrations.pop(worker_id, None)
        for rank in [rank for rank in self._refused if rank.worker_id == worker_id]:
            del self._refused[rank]
