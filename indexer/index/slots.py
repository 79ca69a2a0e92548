"""Slots: the small numbers by which an index knows worker ranks; and ranks for which there was none.

A rank gets the lowest free place. One that was refused is named, with the reason, until it gets one, its worker leaves
or nothing is heard of it for a time; so many names are kept and no more, so that strangers without end cost nothing.

What a worker said of its ranks' capacity is told to the index with each of its ranks, whichever comes first, so that
room is made before the blocks come. Of so many workers it is remembered, and of the oldest forgotten for another's.
"""

from typing import NamedTuple

from indexer.index.prefix_index import RANK_MAX, IndexFull, PrefixIndex
from kv_protocol.events import U32_LIMIT
from kv_protocol.ids import WorkerRank

RANKS_MAX = RANK_MAX + 1
"""As many ranks as one index serves; what comes beyond is refused and counted."""
REFUSED_NAMED_MAX = 256


class _Refused(NamedTuple):
    reason: str
    last_seen_s: float


class RankSlots:
    """Who sits where in one index; registers and drops ranks there."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._rank_of: dict[int, WorkerRank] = {}
        self._free: set[int] = set()
        self._capacity_of: dict[str, int] = {}
        self._refused: dict[WorkerRank, _Refused] = {}
        self.refused_total = 0
        """How often a place was asked for in vain."""

    def take(self, rank: WorkerRank, now_s: float) -> int | None:
        """Return the place of a rank that has none yet; None where it is refused."""
        slot = min(self._free, default=len(self._rank_of))
        if slot > RANK_MAX:
            self._refuse(rank, f"{RANKS_MAX} ranks are known already", now_s)
            return None
        try:
            self._index.register(slot, self._capacity_of.get(rank.worker_id, 0))
        except IndexFull as error:
            self._refuse(rank, str(error), now_s)
            return None
        self._free.discard(slot)
        self._refused.pop(rank, None)
        self._rank_of[slot] = rank
        return slot

    def _refuse(self, rank: WorkerRank, reason: str, now_s: float) -> None:
        self.refused_total += 1
        if rank in self._refused or len(self._refused) < REFUSED_NAMED_MAX:
            self._refused[rank] = _Refused(reason, now_s)

    def give_back(self, slot: int) -> None:
        """The index knows nothing of whoever sat there, and the place is free."""
        self._index.drop(slot)
        del self._rank_of[slot]
        self._free.add(slot)

    def assign(self, rank_of: dict[int, WorkerRank]) -> None:
        """Exactly these sit there, and hold what the index knows of their places; the index knows no other."""
        self._rank_of = dict(sorted(rank_of.items()))
        self._free = set(range(max(rank_of, default=-1) + 1)) - rank_of.keys()
        self._refused.clear()
        for slot in range(RANKS_MAX):
            if slot in rank_of:
                self._index.register(slot, self._capacity_of.get(rank_of[slot].worker_id, 0))
            else:
                self._index.drop(slot)

    def rank_of(self, slot: int) -> WorkerRank:
        """Return who sits there."""
        return self._rank_of[slot]

    def set_capacity(self, worker_id: str, capacity_blocks: int) -> None:
        """Each rank of the worker, here or to come, has room for so many blocks in the index, as far as it gives it."""
        self._capacity_of.pop(worker_id, None)
        if len(self._capacity_of) == RANKS_MAX:
            del self._capacity_of[next(iter(self._capacity_of))]
        capacity_blocks = self._capacity_of[worker_id] = min(capacity_blocks, U32_LIMIT - 1)
        for slot, rank in self._rank_of.items():
            if rank.worker_id == worker_id:
                self._index.register(slot, capacity_blocks)

    def refused(self) -> dict[WorkerRank, str]:
        """Return the named among those who were refused, and why."""
        return {rank: refused.reason for rank, refused in self._refused.items()}

    def is_refused(self, rank: WorkerRank) -> bool:
        """Return whether the rank is named among those who were refused."""
        return rank in self._refused

    def restart_refused_timeouts(self, now_s: float) -> None:
        """Nobody could be heard until now: the silence of who was refused says nothing."""
        self._refused = {rank: refused._replace(last_seen_s=now_s) for rank, refused in self._refused.items()}

    def forget_silent(self, since_s: float) -> None:
        """Who was refused, and not heard since, waits for a place no more."""
        for rank in [rank for rank, refused in self._refused.items() if refused.last_seen_s <= since_s]:
            del self._refused[rank]

    def forget_worker(self, worker_id: str) -> None:
        """No rank of the worker waits for a place any more, and what it said of its capacity is forgotten."""
        self._capacity_of.pop(worker_id, None)
        for rank in [rank for rank in self._refused if rank.worker_id == worker_id]:
            del self._refused[rank]
