"""Decaying sum of prefill work per rank: in-flight load does not show agents that send one request after another.

    history_blocks(t) = sum over requests routed to the rank of prefill_blocks * 2 ^ -((t - routed at) / HALF_LIFE_S)

All sums refer to one moment, so that one factor converts them to another. Once more than HALVINGS_MAX half-lives have
passed since, that moment advances by whole half-lives, so that the sums halve exactly.
"""

import math
from typing import Any

from kv_protocol.ids import WorkerRank

HALF_LIFE_S = 30.0
HALVINGS_MAX = 64.0


class History:
    """The decaying sum of each rank. `now_s` never goes back."""

    def __init__(self) -> None:
        self.sums: dict[WorkerRank, float] = {}
        self.as_of_s: float | None = None

    def add(self, rank: WorkerRank, prefill_blocks: float, now_s: float) -> None:
        """A request with this many blocks to prefill was routed to the rank."""
        if self.as_of_s is None:
            self.as_of_s = now_s
        halvings = (now_s - self.as_of_s) / HALF_LIFE_S
        if halvings > HALVINGS_MAX:
            whole_halvings = math.floor(halvings)
            self.sums = {each: blocks * math.ldexp(1.0, -whole_halvings) for each, blocks in self.sums.items()}
            self.as_of_s += whole_halvings * HALF_LIFE_S
            halvings = (now_s - self.as_of_s) / HALF_LIFE_S
        self.sums[rank] = self.sums.get(rank, 0.0) + prefill_blocks * math.exp2(halvings)

    def blocks(self, rank: WorkerRank, now_s: float) -> float:
        factor = 1.0 if self.as_of_s is None else math.exp2((self.as_of_s - now_s) / HALF_LIFE_S)
        return self.sums.get(rank, 0.0) * factor

    def forget(self, worker_id: str) -> None:
        self.sums = {rank: blocks for rank, blocks in self.sums.items() if rank.worker_id != worker_id}

    def tables(self) -> dict[str, list[Any]]:
        return {"history_moment": [(self.as_of_s,)], "history": list(self.sums.items())}
