"""How much prefill a rank was recently given: in-flight load alone is blind to agents that ask one thing after another.

history_blocks(t) = sum over requests routed to the rank of prefill_blocks * 2 ^ -((t - routed at) / HALF_LIFE_S)
"""

from kv_protocol.ids import WorkerRank

HALF_LIFE_S = 30.0


class History:
    """The decaying sum of each rank."""

    def __init__(self) -> None:
        self._sums: dict[WorkerRank, tuple[float, float]] = {}

    def add(self, rank: WorkerRank, prefill_blocks: float, now_s: float) -> None:
        """A request with so many blocks to prefill was routed to the rank."""
        self._sums[rank] = (self.blocks(rank, now_s) + prefill_blocks, now_s)

    def blocks(self, rank: WorkerRank, now_s: float) -> float:
        """Return what is left of the rank's sum."""
        blocks, at_s = self._sums.get(rank, (0.0, now_s))
        return float(blocks * 2.0 ** ((at_s - now_s) / HALF_LIFE_S))

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        for rank in [rank for rank in self._sums if rank.worker_id == worker_id]:
            del self._sums[rank]
