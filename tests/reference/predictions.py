"""Blocks that ranks are about to hold, from requests in flight: siblings of a burst go to the same rank.

    routed                  the blocks of a request that has some count as held by its rank
    first token             they count for `SEEN_S` more: by then the rank's events have reported them, or never will
    the lease ends          they count no more
    another epoch           of the rank's stream, in which a request was routed since: the blocks of the former epoch
                            went into a cache that does not exist any more
    worker forgotten        they count no more

No prediction outlives its request: between consecutive requests only the index says what is held. A rank's epoch is
over, too, once it has no expected block: the next request begins it anew.
"""

import math
from dataclasses import dataclass

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed
from tests.reference.chains import blocks_of, depth

SEEN_S = 2.0


@dataclass(eq=False)
class Life:
    """One epoch of a rank's stream."""

    rank: WorkerRank
    epoch: int


@dataclass(eq=False)
class Prediction:
    """Expected blocks; they count while `life` is the rank's current one."""

    life: Life
    blocks: bytes


class Predictions:
    """The predictions of all requests in flight, by their leases. Unknown leases and second endings change nothing.

    `now_s` never decreases.
    """

    def __init__(self) -> None:
        self.predictions: dict[str, Prediction] = {}
        self.current: dict[WorkerRank, Life] = {}  # the epoch of the last request
        self.seen: dict[str, float] = {}  # when predictions expire; in the order of their first tokens

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        match event:
            case Routed():
                self.tick(now_s)
                self._add(event)
            case FirstToken(lease_id=lease_id) if lease_id in self.predictions:
                self.seen.setdefault(lease_id, now_s + SEEN_S)
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                self.end(lease_id)
            case _:
                pass

    def _add(self, routed: Routed) -> None:
        if routed.lease_id in self.predictions or not routed.blocks:
            return
        rank = WorkerRank(routed.worker_id, routed.dp_rank)
        life = self.current.get(rank)
        if life is None or life.epoch != routed.epoch:
            life = self.current[rank] = Life(rank, routed.epoch)
        self.predictions[routed.lease_id] = Prediction(life, routed.blocks)

    def _blocks(self, life: Life) -> set[bytes]:
        return blocks_of(each.blocks for each in self.predictions.values() if each.life is life)

    def end(self, lease_id: str) -> None:
        prediction = self.predictions.pop(lease_id, None)
        if prediction is None:
            return
        self.seen.pop(lease_id, None)
        life = prediction.life
        if self.current.get(life.rank) is life and not self._blocks(life):
            del self.current[life.rank]

    def forget(self, worker_id: str) -> None:
        for lease_id, prediction in list(self.predictions.items()):
            if prediction.life.rank.worker_id == worker_id:
                self.end(lease_id)

    def tick(self, now_s: float) -> None:
        for lease_id, over_at_s in list(self.seen.items()):
            if over_at_s <= now_s:
                self.end(lease_id)

    def expected(self, chain: bytes, rank: WorkerRank, epoch: int, now_s: float) -> int:
        """Return how many leading blocks of `chain` are expected at the rank, if its stream is in this epoch."""
        self.tick(now_s)
        life = self.current.get(rank)
        return 0 if life is None or life.epoch != epoch else depth(chain, self._blocks(life))

    def until_s(self, lease_id: str) -> float:
        """Return until when the lease's blocks are expected; inf: until its first token, or its end; -inf: never."""
        prediction = self.predictions.get(lease_id)
        if prediction is None or self.current.get(prediction.life.rank) is not prediction.life:
            return -math.inf
        return self.seen.get(lease_id, math.inf)
