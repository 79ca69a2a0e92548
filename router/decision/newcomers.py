"""Reserves a share of full misses (requests of which no rank has a block) for ranks that joined lately.

A rank that joins a working fleet is idle and empty: without a bound it would get all full misses at once. Until it has
filled a quarter of its blocks it gets at most one of 2 x ranks.

    joined           a founder, while the model's eldest rank has been known for less than `GATHER_S` (the fleet or the
                     router starts), or if the worker does not state its `total_kv_blocks`; else a newcomer
    settled          a rank, founder or newcomer, whose blocks in use were once reported (`LoadApplied`) as a quarter of
                     `total_kv_blocks`, or to which as many uncached blocks were promised (`Routed`); it stays so.
                     The journal has both, but not the content of the index
    full miss        counted by every newcomer that it did not go to; the newcomer that it went to restarts at 0
    slice spent      until 2 x ranks - 1 full misses are counted: at most every (2 x ranks)-th is the newcomer's own
    none settled     among the ranks: none is held back, since all are equally cold

The state consists of counters only, so the same records give the same answers.
"""

from collections.abc import Sequence

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.journal.checkpoint_rows import NewcomerRow

GATHER_S = 30.0
SETTLED_SHARE = 4
"""A quarter of its blocks."""


class _RankShare:
    __slots__ = ("is_newcomer", "is_settled", "joined_s", "misses", "model", "promised_blocks", "settled_blocks")

    def __init__(self, model: str, joined_s: float, settled_blocks: int, *, is_newcomer: bool) -> None:
        self.model = model
        self.joined_s = joined_s
        self.is_newcomer = is_newcomer
        self.settled_blocks = settled_blocks
        self.is_settled = False
        self.promised_blocks = 0.0
        self.misses = 0


class Newcomers:
    """All ranks' shares of full misses."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerRank, _RankShare] = {}
        self._newcomers: dict[WorkerRank, _RankShare] = {}

    def joined(self, registration: WorkerRegistered, now_s: float) -> None:
        """A worker registered a new instance."""
        self.forget(registration.worker_id)
        eldest_s = min(
            (each.joined_s for each in self._ranks.values() if each.model == registration.model), default=now_s
        )
        is_newcomer = bool(registration.total_kv_blocks) and now_s - eldest_s >= GATHER_S
        settled_blocks = -(-registration.total_kv_blocks // SETTLED_SHARE)
        for rank in registration.ranks:
            known = self._ranks[rank] = _RankShare(registration.model, now_s, settled_blocks, is_newcomer=is_newcomer)
            if is_newcomer:
                self._newcomers[rank] = known

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            del self._ranks[rank]
            self._newcomers.pop(rank, None)

    def used(self, rank: WorkerRank, blocks: int) -> None:
        """The rank's engine reported this many blocks in use."""
        self._settle(rank, blocks)

    def promised(self, rank: WorkerRank, uncached_blocks: float) -> None:
        """A request was routed to the rank, which must compute this many blocks of it."""
        known = self._ranks.get(rank)
        if known is not None and not known.is_settled:
            known.promised_blocks += uncached_blocks
            self._settle(rank, known.promised_blocks)

    def _settle(self, rank: WorkerRank, blocks: float) -> None:
        known = self._ranks.get(rank)
        if known is not None and known.settled_blocks and blocks >= known.settled_blocks:
            known.is_settled = True
            self._newcomers.pop(rank, None)

    @property
    def is_any(self) -> bool:
        """Whether there is a newcomer: without any, no full miss needs to be counted."""
        return bool(self._newcomers)

    def missed(self, winner: WorkerRank, ranks: Sequence[WorkerRank]) -> None:
        """A full miss went to `winner`: none of `ranks`, all that serve its model, had or expected a block of it."""
        if not self._newcomers:
            return
        for rank in ranks:
            newcomer = self._newcomers.get(rank)
            if newcomer is not None:
                newcomer.misses = 0 if rank == winner else newcomer.misses + 1

    def rows(self) -> list[NewcomerRow]:
        """Return the rows for a checkpoint."""
        return [
            NewcomerRow(
                rank,
                each.model,
                each.joined_s,
                each.settled_blocks,
                each.is_newcomer,
                each.is_settled,
                each.promised_blocks,
                each.misses,
            )
            for rank, each in self._ranks.items()
        ]

    def restore(self, row: NewcomerRow) -> None:
        """Restore a rank from its row."""
        known = _RankShare(row.model, row.joined_s, row.settled_blocks, is_newcomer=row.is_newcomer)
        known.is_settled, known.promised_blocks, known.misses = row.is_settled, row.promised_blocks, row.misses
        self._ranks[row.rank] = known
        if row.is_newcomer and not row.is_settled:
            self._newcomers[row.rank] = known

    def flags(self, ranks: Sequence[WorkerRank]) -> tuple[bool, ...]:
        """Return for each rank that serves a model whether its share of full misses is spent.

        Such a rank is excluded from a full miss if another eligible rank has a share left.
        """
        if not self._newcomers or not self._is_any_settled(ranks):
            return (False,) * len(ranks)
        least = 2 * len(ranks) - 1
        newcomers = self._newcomers
        return tuple(rank in newcomers and newcomers[rank].misses < least for rank in ranks)

    def _is_any_settled(self, ranks: Sequence[WorkerRank]) -> bool:
        return any(rank in self._ranks and self._ranks[rank].is_settled for rank in ranks)
