"""Places (slots) of worker ranks in an index, which knows them by small numbers alone; and who found none.

A rank gets the lowest free place. One that was refused is named, with the reason, until it gets one or its worker
leaves; so many names are kept and no more, so that strangers without end cost nothing.
"""

from indexer.core.prefix_index import RANK_MAX, IndexFull, PrefixIndex
from kv_protocol.ids import WorkerRank

RANKS_MAX = RANK_MAX + 1
"""More ranks than one index serves; what comes beyond is refused and counted."""
REFUSED_NAMED_MAX = 256


class Places:
    """Who sits where in one index; registers and drops ranks there."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._rank_of: dict[int, WorkerRank] = {}
        self._free: set[int] = set()
        self._refused: dict[WorkerRank, str] = {}
        self.refused_total = 0
        """How often a place was asked for in vain."""

    def take(self, rank: WorkerRank) -> int | None:
        """Return the place of a rank that has none yet; None where it is refused."""
        slot = min(self._free, default=len(self._rank_of))
        if slot > RANK_MAX:
            self._refuse(rank, f"{RANKS_MAX} ranks are known already")
            return None
        try:
            self._index.register(slot)
        except IndexFull as error:
            self._refuse(rank, str(error))
            return None
        self._free.discard(slot)
        self._refused.pop(rank, None)
        self._rank_of[slot] = rank
        return slot

    def _refuse(self, rank: WorkerRank, reason: str) -> None:
        self.refused_total += 1
        if len(self._refused) < REFUSED_NAMED_MAX:
            self._refused.setdefault(rank, reason)

    def give_back(self, slot: int) -> None:
        """The index knows nothing of whoever sat there, and the place is free."""
        self._index.drop(slot)
        del self._rank_of[slot]
        self._free.add(slot)

    def rank_of(self, slot: int) -> WorkerRank:
        """Return who sits there."""
        return self._rank_of[slot]

    def refused(self) -> dict[WorkerRank, str]:
        """Return the named among those who were refused, and why."""
        return dict(self._refused)

    def forget_worker(self, worker_id: str) -> None:
        """No rank of the worker waits for a place any more."""
        for rank in [rank for rank in self._refused if rank.worker_id == worker_id]:
            del self._refused[rank]
