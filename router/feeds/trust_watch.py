"""Writes to the log and to the journal when trust in a rank changes: each change once, and what requests showed of it.

A state is written if it was the same at two checks in a row: a heartbeat that overtakes its batches is not logged. A
rank has one line per state and reason in 10 s; beyond 256 lines in that time the others share one, with their number
(`suppressed`). The journal has all of them.

Of a router in several processes one follows the streams, and the others see what requests show: each of these writes
the doubts of its own requests alone.
"""

import asyncio

import structlog
from msgspec.structs import replace

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import TrustMoved
from kv_runtime.clock import Clock
from kv_runtime.telemetry import RateLimitedLog
from router.decision.routing import Routing
from router.fleet.calibration import COMPARE_DOUBTS, CompareDoubt, Move
from router.fleet.trust import EXACT, Trust

LOOK_S = 1.0

_log = structlog.get_logger("router")


class TrustWatch:
    """Checks every rank's trust; a part of a process."""

    def __init__(self, routing: Routing, clock: Clock) -> None:
        self._routing, self._clock = routing, clock
        self._evidence = dict[WorkerRank, Move]()
        self._lines = RateLimitedLog(_log, clock)
        self._seen = dict[WorkerRank, Trust]()
        self._logged = dict[WorkerRank, Trust]()

    async def run(self, stop: asyncio.Event) -> None:
        """Check periodically until `stop` is set."""
        while not stop.is_set():
            self.look()
            await self._clock.wait(stop, LOOK_S)

    def look(self) -> None:
        """Write what requests showed, and each new state that was the same at the last check."""
        for move in self._routing.moves():
            self._evidence[move.rank] = move
            self._log_move(move)
        before, self._seen = self._seen, self._routing.trust()
        self._logged = {rank: trust for rank, trust in self._logged.items() if rank in self._seen}
        self._evidence = {rank: move for rank, move in self._evidence.items() if rank in self._seen}
        for rank, trust in self._seen.items():
            logged = self._logged.get(rank, EXACT)
            if trust != logged and trust == before.get(rank):
                self._logged[rank] = trust
                self._routing.apply(self._moved(rank, trust, logged))
                say = self._lines.info if trust == EXACT else self._lines.warning
                say(
                    "rank_trust_changed",
                    key=(rank, trust),
                    worker=rank.worker_id,
                    dp_rank=rank.dp_rank,
                    trust=trust.state,
                    reason=trust.reason,
                    was=logged.state,
                )

    def _moved(self, rank: WorkerRank, trust: Trust, was: Trust) -> TrustMoved:
        """Return the journal's record, with the evidence if requests made the change."""
        record = TrustMoved(
            now_s=self._clock.now(),
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            trust=trust.state,
            reason=trust.reason,
            was=was.state,
            was_reason=was.reason,
        )
        move, doubt = self._evidence.get(rank), _doubt_of(trust) or _doubt_of(was)
        if move is None or move.doubt != doubt:
            return record
        shown = move.evidence()
        del shown["doubt"]
        return replace(record, **shown)

    def _log_move(self, move: Move) -> None:
        shown = {"worker": move.rank.worker_id, "dp_rank": move.rank.dp_rank, **move.evidence()}
        if move.is_over:
            self._lines.info("predictions_trusted", key=(move.rank, move.doubt), **shown)
        else:
            self._lines.warning("predictions_doubted", key=(move.rank, move.doubt), **shown)


def _doubt_of(trust: Trust) -> CompareDoubt | None:
    """Return the doubt of requests that is the reason of this trust; None: there is another reason, or none."""
    return next((doubt for doubt in COMPARE_DOUBTS if trust.reason.partition(";")[0] == doubt), None)
