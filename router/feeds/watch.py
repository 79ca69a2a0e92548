"""Writes to the log when a worker falls silent or comes back, and when a breaker opens or closes: each change once.

| event | level | when |
|---|---|---|
| `worker_silent`, `worker_heard_again` | warning, info | no heartbeat for `SILENT_S`; one came after that |
| `breaker_opened`, `breaker_half_open`, `breaker_closed` | warning, info, info | the rank's breaker, or its worker's |

Nothing is said of silence while the event log is away: heartbeats then cannot come. A change that is undone within
`LOOK_S` is not seen.
"""

import asyncio

import structlog

from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from router.decision.routing import Routing
from router.fleet.breakers import BreakerState
from router.fleet.registry import SILENT_S

LOOK_S = 1.0

_log = structlog.get_logger("router")


class FleetWatch:
    """Checks the fleet's workers and breakers; a part of a process."""

    def __init__(self, routing: Routing, clock: Clock) -> None:
        self._routing, self._clock = routing, clock
        self._silent = set[str]()
        self._breakers = dict[WorkerRank, BreakerState]()

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
