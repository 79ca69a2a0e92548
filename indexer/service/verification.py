"""Compares a live index with every rank's mirror (`difference.py`).

The index is read first, the mirror second, so the mirror is at the same place or further. If it is further, the batches
between are requested from it. Differences that may pass (another epoch, missing batches between, a rank unknown to the
index) are checked again for `timeout_s`.

A rank that the index does not know and whose mirror does not answer is left out.
"""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from indexer.follow.rank_state import RankState
from indexer.service.difference import RankVerdict, Verdict, compare
from indexer.service.index_client import IndexClient
from indexer.service.mirrors import Mirrors, MirrorSilent
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock

_PASSING: tuple[Verdict, ...] = ("other_epoch", "behind", "unknown")
_AGAIN_S = 0.25


class Verification:
    """One comparison of all ranks."""

    def __init__(
        self, index: IndexClient, mirrors: Mirrors, clock: Clock, *, timeout_s: float, examples_max: int
    ) -> None:
        self._index, self._mirrors, self._clock = index, mirrors, clock
        self._timeout_s, self._examples_max = timeout_s, examples_max

    async def verdicts(self, slugs: dict[WorkerRank, str]) -> AsyncIterator[RankVerdict]:
        """Yield the verdict of every rank that the index knows or whose mirror answers, by name.

        Raises:
            IndexUnavailable, BrokerUnavailable: the comparison could not be completed.
        """
        known = await self._index.ranks()
        for rank in sorted({*slugs, *known.ranks}):
            verdict = await self._verdict(rank, slugs.get(rank, ""))
            if verdict is not None:
                refused = known.refused.get(str(rank), "") if verdict.verdict == "unknown" else ""
                yield replace(verdict, reason=f"refused by the index: {refused}") if refused else verdict

    async def _verdict(self, rank: WorkerRank, slug: str) -> RankVerdict | None:
        ends_s = self._clock.now() + self._timeout_s
        while True:
            verdict = await self._compare_once(rank, slug)
            if verdict is None or verdict.verdict not in _PASSING or self._clock.now() >= ends_s:
                return verdict
            await self._clock.sleep(_AGAIN_S)

    async def _compare_once(self, rank: WorkerRank, slug: str) -> RankVerdict | None:
        index = await self._index.state(rank)
        try:
            mirror = await self._mirrors.state(slug, rank) if slug else None
        except MirrorSilent:
            mirror = None
        if index is None and mirror is None:
            return None
        tail: list[bytes] = []
        if index is not None and mirror is not None and index.epoch == mirror.epoch and index.seq < mirror.seq:
            tail = await self._tail(slug, index)
        return compare(rank, index, mirror, tail, examples_max=self._examples_max)

    async def _tail(self, slug: str, index: RankState) -> list[bytes]:
        try:
            return await self._mirrors.messages_since(slug, index.rank, index.epoch, index.seq)
        except MirrorSilent:
            return []
