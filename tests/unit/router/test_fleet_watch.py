"""Silent workers and breakers in the log: each change once, with its cause."""

from typing import Any

from structlog.testing import capture_logs

from kv_protocol.journal import AttemptEnded, AttemptOutcome, LogConnection, WorkerHeard
from router.feeds.watch import FleetWatch
from router.fleet.registry import SILENT_S
from tests.unit.router.samples import registered, route
from tests.unit.router.test_routing import Bench


class Watched:
    """A fleet, and what is logged of it."""

    def __init__(self, *workers: Any) -> None:
        self.bench = Bench(*workers)
        self.watch = FleetWatch(self.bench.routing, self.bench.clock)

    async def after(self, seconds: float = 0.0) -> list[tuple[Any, ...]]:
        """Return what a look so much later logs: event, level, worker and reason."""
        await self.bench.clock.advance(seconds)
        with capture_logs() as logged:
            self.watch.look()
        return [(line["event"], line["log_level"], line["worker"], line.get("reason")) for line in logged]

    def hear(self, worker_id: str) -> None:
        now_s = self.bench.clock.now()
        self.bench.state.apply(WorkerHeard(now_s=now_s, worker_id=worker_id, instance=f"{worker_id}-1"))

    def attempt(self, outcome: AttemptOutcome, phase: str = "first_byte", reason: str = "too slow", **own: Any) -> None:
        ended = AttemptEnded(
            now_s=self.bench.clock.now(), worker_id="w0", dp_rank=0, outcome=outcome, phase=phase, reason=reason, **own
        )
        self.bench.state.apply(ended)


async def test_a_worker_that_falls_silent_and_returns_is_logged_once_each() -> None:
    watched = Watched(registered(), registered("w1"))
    assert await watched.after(SILENT_S - 0.1) == []
    watched.hear("w1")
    assert await watched.after(0.1) == [("worker_silent", "warning", "w0", None)]
    assert await watched.after(1.0) == []
    watched.hear("w0")
    assert await watched.after() == [("worker_heard_again", "info", "w0", None)]
    assert await watched.after() == []


async def test_silence_says_nothing_while_the_event_log_is_away() -> None:
    watched = Watched()
    watched.bench.state.apply(LogConnection(now_s=watched.bench.clock.now(), heard=False))
    assert await watched.after(10 * SILENT_S) == []
    watched.bench.state.apply(LogConnection(now_s=watched.bench.clock.now(), heard=True))
    assert await watched.after() == []


async def test_a_breaker_is_logged_as_it_opens_tries_again_and_closes() -> None:
    watched = Watched()
    watched.attempt("failed", "connect", "ConnectionRefusedError")
    cause = "connect: ConnectionRefusedError"
    assert await watched.after() == [("breaker_opened", "warning", "w0", cause)]
    assert await watched.after(1.0) == []
    watched.hear("w0")
    assert await watched.after(10.0) == [
        ("worker_silent", "warning", "w0", None),
        ("breaker_half_open", "info", "w0", cause),
    ]
    watched.hear("w0")
    lease = watched.bench.take(route())
    watched.attempt("ok", reason="", decision_id=lease.verdict.decision_id)
    assert await watched.after() == [
        ("worker_heard_again", "info", "w0", None),
        ("breaker_closed", "info", "w0", None),
    ]
