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
from dataclasses import dataclass
from typing import Any

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank

GATHER_S = 30.0
SETTLED_SHARE = 4
"""A quarter of its blocks."""


@dataclass
class Share:
    """A rank of the fleet, newcomer or not."""

    model: str
    joined_s: float
    settled_blocks: int
    is_newcomer: bool
    is_settled: bool = False
    promised_blocks: float = 0.0
    misses: int = 0


class Newcomers:
    """All ranks' shares of full misses."""

    def __init__(self) -> None:
        self.ranks: dict[WorkerRank, Share] = {}

    def joined(self, registration: WorkerRegistered, now_s: float) -> None:
        self.forget(registration.worker_id)
        model = registration.model
        eldest_s = min((each.joined_s for each in self.ranks.values() if each.model == model), default=now_s)
        is_newcomer = bool(registration.total_kv_blocks) and now_s - eldest_s >= GATHER_S
        settled_blocks = -(-registration.total_kv_blocks // SETTLED_SHARE)
        for rank in registration.ranks:
            self.ranks[rank] = Share(model, now_s, settled_blocks, is_newcomer)

    def forget(self, worker_id: str) -> None:
        self.ranks = {rank: each for rank, each in self.ranks.items() if rank.worker_id != worker_id}

    def used(self, rank: WorkerRank, blocks: float) -> None:
        """The rank's engine reported this many blocks in use, or so many were promised."""
        known = self.ranks.get(rank)
        if known is not None and known.settled_blocks and blocks >= known.settled_blocks:
            known.is_settled = True

    def promised(self, rank: WorkerRank, uncached_blocks: float) -> None:
        """A request was routed to the rank, which must compute this many blocks of it."""
        known = self.ranks.get(rank)
        if known is not None and not known.is_settled:
            known.promised_blocks += uncached_blocks
            self.used(rank, known.promised_blocks)

    def is_newcomer(self, rank: WorkerRank) -> bool:
        known = self.ranks.get(rank)
        return known is not None and known.is_newcomer and not known.is_settled

    def missed(self, winner: WorkerRank, ranks: Sequence[WorkerRank]) -> None:
        """A full miss went to `winner`: none of `ranks`, all that serve its model, had or expected a block of it."""
        for rank in filter(self.is_newcomer, ranks):
            self.ranks[rank].misses = 0 if rank == winner else self.ranks[rank].misses + 1

    def spent(self, ranks: Sequence[WorkerRank]) -> list[bool]:
        """Return for each rank that serves a model whether its share of full misses is spent.

        Such a rank is excluded from a full miss if another eligible rank has a share left.
        """
        is_any_settled = any(rank in self.ranks and self.ranks[rank].is_settled for rank in ranks)
        least = 2 * len(ranks) - 1
        return [is_any_settled and self.is_newcomer(rank) and self.ranks[rank].misses < least for rank in ranks]

    def tables(self) -> dict[str, list[Any]]:
        return {"newcomers": [(rank, [*vars(each).values()]) for rank, each in self.ranks.items()]}
