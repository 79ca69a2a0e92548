"""Writes to the log when a worker falls silent, a breaker opens or trust in a rank changes, and back: each change once.

| event | level | when |
|---|---|---|
| `worker_silent`, `worker_heard_again` | warning, info | no heartbeat for `SILENT_S`; one came after that |
| `breaker_opened`, `breaker_half_open`, `breaker_closed` | warning, info, info | the rank's breaker, or its worker's |
| `predictions_doubted`, `predictions_trusted` | warning, info | what requests showed of a rank |
| `rank_trust_changed` | warning; info to EXACT | trust in a rank changed; the journal has it, too, with the evidence |

Nothing is said of silence while the event log is away: heartbeats then cannot come. A change that is undone within
`LOOK_S` is not seen. A state of trust is written if it was the same at two checks in a row: a heartbeat that overtakes
its batches is not logged. A rank has one line per state and reason in 10 s; beyond 256 lines in that time the others
share one, with their number (`suppressed`). The journal has all of them.

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
from router.fleet.breakers import BreakerState
from router.fleet.calibration import COMPARE_DOUBTS, CompareDoubt, Move
from router.fleet.registry import SILENT_S
from router.fleet.trust import EXACT, Trust

LOOK_S = 1.0

_log = structlog.get_logger("router")


class FleetWatch:
    """Checks the fleet's workers, breakers and trust; a part of a process."""

    def __init__(self, routing: Routing, clock: Clock) -> None:
        self._routing, self._clock = routing, clock
        self._silent = set[str]()
        self._breakers = dict[WorkerRank, BreakerState]()
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
        """Log what has changed since the last check."""
        now_s = self._clock.now()
        if self._routing.state.fleet.is_log_connected:
            self._look_at_workers(now_s)
        self._look_at_breakers(now_s)
        self._look_at_trust()

    def _look_at_workers(self, now_s: float) -> None:
        before, self._silent = self._silent, set()
        for worker in self._routing.state.fleet.workers():
            worker_id, heard_at_s = worker.registration.worker_id, worker.heard_at_s
            if heard_at_s is None:
                continue
            if now_s >= heard_at_s + SILENT_S:
                self._silent.add(worker_id)
                if worker_id not in before:
                    _log.warning("worker_silent", worker=worker_id, silent_s=round(now_s - heard_at_s, 1))
            elif worker_id in before:
                _log.info("worker_heard_again", worker=worker_id)

    def _look_at_breakers(self, now_s: float) -> None:
        breakers, before = self._routing.state.breakers, self._breakers
        if not (breakers.is_any or before):
            return
        ranks = [rank for worker in self._routing.state.fleet.workers() for rank in worker.registration.ranks]
        states = {rank: breakers.state(rank, now_s) for rank in ranks}
        self._breakers = {rank: state for rank, state in states.items() if state != "closed"}
        for rank, state in states.items():
            if state != before.get(rank, "closed"):
                fields = {"worker": rank.worker_id, "dp_rank": rank.dp_rank}
                if state == "open":
                    _log.warning("breaker_opened", **fields, reason=breakers.reason(rank, now_s))
                elif state == "half_open":
                    _log.info("breaker_half_open", **fields, reason=breakers.reason(rank, now_s))
                else:
                    _log.info("breaker_closed", **fields)

    def _look_at_trust(self) -> None:
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
