"""What ranks are about to hold: the blocks of requests on their way there, so that siblings of a burst land together.

    routed                  the request's blocks count as held by its rank
    first token             they count for `SEEN_S` more: by then the rank's events have told of them, or never will
    the lease ends          they count no more
    another epoch           of the rank's stream: what was on its way went into a cache that is no more
    worker forgotten        they count no more

Nothing of it outlives its request, so of requests that come one after the other the index alone says what is held.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed
from router.core.chains import shared_blocks

SEEN_S = 2.0


class _Prediction(NamedTuple):
    epoch: int
    blocks: tuple[int, ...]
    ends_at_s: float


class Predictions:
    """The predictions of all requests in flight, by their leases. Unknown leases and second endings change nothing."""

    def __init__(self) -> None:
        self._of_rank: dict[WorkerRank, dict[str, _Prediction]] = {}
        self._rank_of: dict[str, WorkerRank] = {}

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        """Fold one event in; those that say nothing of a request's way are welcome."""
        match event:
            case Routed():
                self._add(event, now_s)
            case FirstToken(lease_id=lease_id):
                self._see(lease_id, now_s)
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                self._end(lease_id)
            case _:
                pass

    def _add(self, routed: Routed, now_s: float) -> None:
        rank = self._rank_of.get(routed.lease_id)
        if rank is not None and self._of_rank[rank][routed.lease_id].ends_at_s > now_s:
            return
        self._end(routed.lease_id)
        rank = self._rank_of[routed.lease_id] = WorkerRank(routed.worker_id, routed.dp_rank)
        on_their_way = self._of_rank.setdefault(rank, {})
        on_their_way[routed.lease_id] = _Prediction(routed.epoch, routed.blocks, float("inf"))

    def _see(self, lease_id: str, now_s: float) -> None:
        rank = self._rank_of.get(lease_id)
        if rank is not None:
            on_their_way = self._of_rank[rank]
            known = on_their_way[lease_id]
            on_their_way[lease_id] = known._replace(ends_at_s=min(known.ends_at_s, now_s + SEEN_S))

    def _end(self, lease_id: str) -> None:
        rank = self._rank_of.pop(lease_id, None)
        if rank is not None:
            on_their_way = self._of_rank[rank]
            del on_their_way[lease_id]
            if not on_their_way:
                del self._of_rank[rank]

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or begins anew: nothing is on its way to what it was."""
        for rank in [rank for rank in self._of_rank if rank.worker_id == worker_id]:
            for lease_id in self._of_rank.pop(rank):
                del self._rank_of[lease_id]

    def tick(self, now_s: float) -> None:
        """Let go of what is over; no answer changes by it."""
        ended = [
            lease_id
            for on_their_way in self._of_rank.values()
            for lease_id, prediction in on_their_way.items()
            if prediction.ends_at_s <= now_s
        ]
        for lease_id in ended:
            self._end(lease_id)

    def overlap(self, hashes: Sequence[int], rank: WorkerRank, epoch: int, now_s: float) -> int:
        """Return how many leading blocks `rank`, whose stream is in `epoch`, is about to hold."""
        longest = 0
        for its_epoch, blocks, ends_at_s in self._of_rank.get(rank, {}).values():
            if longest == len(hashes):
                break
            can_be_longer = longest < len(blocks) and blocks[longest] == hashes[longest]
            if can_be_longer and its_epoch == epoch and ends_at_s > now_s:
                longest = shared_blocks(hashes, blocks)
        return longest
