"""Finds event addresses that were swapped: the blocks of a worker's requests appear at another worker.

    the new blocks of a request appear    what follows
    ----------------------------------    -----------------------------------------------------------
    at the rank that got it               its events are its own: its stream is not watched any longer
    at one other rank alone               a vote; with `VOTES` the rank is named, with the other one
    nowhere, for `_GIVEN_UP_S`            nothing: the prompt was not computed, or its engine is slow

A request shows nothing if its rank is not EXACT, or if a rank holds all blocks of its prompt.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import structlog

from kv_protocol.ids import WorkerRank
from router.decision.routing import OverlapIndex, Routing
from router.fleet.trust import Disparity
from router.prompt.chains import BLOCK_BYTES

VOTES = 4
_WATCHED_MAX = 64
_LOOKED_AT_MAX = 256
"""Decisions of a busy second that are looked at: the newest."""
_PERIOD_S = 1.0
_AFTER_S, _GIVEN_UP_S = 2.0, 30.0
"""Between a decision and the first look for its blocks, and the last."""

_log = structlog.get_logger("router")


class _Sent(NamedTuple):
    """A request; no rank held more than the first `held` blocks of its prompt."""

    at_s: float
    rank: WorkerRank
    epoch: int
    hashes: bytes
    held: int


class EventOrigins:
    """Looks at the newest decisions of a router; a part of its process."""

    def __init__(self, routing: Routing, index: OverlapIndex) -> None:
        self._routing, self._index = routing, index
        self._seen = routing.decisions.added_total
        self._sent: deque[_Sent] = deque(maxlen=_WATCHED_MAX)
        self._own: dict[WorkerRank, int] = {}
        """The epoch of each stream that is the rank's own."""
        self._votes: dict[WorkerRank, Counter[WorkerRank]] = {}

    def differs(self, worker_id: str) -> tuple[Disparity, ...]:
        """Return that the worker's events are those of another one; empty as far as is known."""
        for rank, votes in self._votes.items():
            ((other, count),) = votes.most_common(1)
            if rank.worker_id == worker_id and count >= VOTES:
                return (Disparity("kv_events", f"those of {other}", f"those of {rank}"),)
        return ()

    async def run(self, stop: asyncio.Event) -> None:
        """Look for the blocks of requests until `stop` is set."""
        while not stop.is_set():
            self.look()
            await self._routing.clock.wait(stop, _PERIOD_S)

    def look(self) -> None:
        """Look once."""
        now_s, workers = self._routing.clock.now(), self._routing.state.fleet.workers()
        ranks = tuple(rank for worker in workers for rank in worker.registration.ranks)
        self._own = {rank: epoch for rank, epoch in self._own.items() if rank in ranks}
        self._votes = {rank: votes for rank, votes in self._votes.items() if rank in ranks}
        self._sent += reversed(list(islice(self._new(), _WATCHED_MAX)))
        waiting = list(self._sent)
        self._sent.clear()
        for sent in waiting:
            if sent.rank not in ranks or now_s - sent.at_s >= _GIVEN_UP_S:
                continue
            if now_s - sent.at_s < _AFTER_S or not self._is_judged(sent, ranks):
                self._sent.append(sent)

    def _new(self) -> Iterator[_Sent]:
        """Yield decisions since the last look of which new blocks are expected at a watched rank, newest first."""
        decisions, own = self._routing.decisions, self._own
        count, self._seen = min(decisions.added_total - self._seen, _LOOKED_AT_MAX), decisions.added_total
        for lease in decisions.newest(count):
            verdict = lease.verdict
            if verdict.is_blank or own.get(verdict.winner) == verdict.epoch or verdict.trust != "EXACT":
                continue
            hashes, held = verdict.request.sequence_hashes, int(verdict.overlap[-1].max())
            if verdict.request.phase != "decode" and len(hashes) > held * BLOCK_BYTES:
                yield _Sent(verdict.now_s, verdict.winner, verdict.epoch, hashes, held)

    def _is_judged(self, sent: _Sent, ranks: tuple[WorkerRank, ...]) -> bool:
        depths = self._index.columns(sent.hashes, ranks).depths[-1].tolist()
        found = [rank for rank, depth in zip(ranks, depths, strict=True) if depth > sent.held]
        if sent.rank in found:
            self._own[sent.rank] = sent.epoch
            if self._votes.pop(sent.rank, Counter()).total() >= VOTES:
                _log.info("engine_events_are_its_own", worker=sent.rank.worker_id, dp_rank=sent.rank.dp_rank)
        elif len(found) == 1:
            votes = self._votes.setdefault(sent.rank, Counter())
            votes[found[0]] += 1
            if votes[found[0]] == VOTES:
                _log.error("engine_events_of_another", worker=sent.rank.worker_id, found=str(found[0]))
        return bool(found)
