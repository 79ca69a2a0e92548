"""What changes in the fleet, in the log, as marks and in the journal: each change once, with its cause."""

import asyncio
from collections.abc import Iterable
from typing import Any

from structlog.testing import capture_logs

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    AttemptEnded,
    AttemptOutcome,
    FleetApplied,
    LogConnection,
    TrustMoved,
    WorkerHeard,
)
from kv_runtime.telemetry import LOG_KEYS_MAX, LOG_PERIOD_S
from router.decision.policy import Policy
from router.feeds.watch import MARKS_OF_A_LOOK, FleetWatch
from router.fleet.registry import SILENT_S
from router.fleet.trust import ENOUGH
from tests.unit.router.samples import registered, route
from tests.unit.router.test_routing import Bench


def looks(bench: Bench, watch: FleetWatch, stales: Iterable[str]) -> list[Any]:
    """Look once at each of these, and return what was told: level, rank, state, reason, former state."""
    with capture_logs() as logs:
        for stale in stales:
            bench.index.doubt = stale
            watch.look()
    names = ("log_level", "worker", "dp_rank", "trust", "reason", "was")
    assert {entry["event"] for entry in logs} <= {"rank_trust_changed"}
    return [tuple(entry[name] for name in names) for entry in logs]


def watched(*workers: Any, **bench: Any) -> tuple[Bench, FleetWatch]:
    made = Bench(*workers, **bench)
    return made, FleetWatch(made.routing, dict)


def test_a_loss_of_trust_is_a_warning_and_its_return_is_told_too_each_once() -> None:
    told = looks(*watched(), ["", "log_away", "log_away", "log_away", "", "", ""])
    assert told == [
        ("warning", "w0", 0, "DEGRADED", "event log away", "EXACT"),
        ("info", "w0", 0, "EXACT", "", "DEGRADED"),
    ]


def test_another_reason_for_the_same_state_is_news() -> None:
    told = looks(*watched(), ["source", "source", "resyncing", "resyncing"])
    assert [reason for _, _, _, _, reason, _ in told] == ["source", "resyncing"]


def test_what_is_seen_at_one_look_alone_is_no_news() -> None:
    assert looks(*watched(), ["", "behind", "", "behind", "", ""]) == []


def test_a_rank_without_events_and_one_that_differs_are_told_with_the_reason() -> None:
    bench, watch = watched(registered(), registered("w1", tokenizer_digest="x"))
    differs = "tokenizer_digest: found 'x', allowed 'tokenizer-1'; approximate"
    assert looks(bench, watch, ["never_heard", "never_heard"]) == [
        ("warning", "w0", 0, "FALLBACK", "no KV events heard; approximate", "EXACT"),
        ("warning", "w1", 0, "FALLBACK", differs, "EXACT"),
    ]


def test_of_a_worker_that_left_nothing_is_kept() -> None:
    bench, watch = watched()
    looks(bench, watch, ["source", "source"])
    bench.state.apply(FleetApplied(now_s=100.0, event=WorkerLeft(worker_id="w0", instance="w0-1")))
    assert looks(bench, watch, ["source"]) == []
    bench.state.apply(FleetApplied(now_s=100.0, event=registered()))
    asyncio.run(bench.clock.advance(LOG_PERIOD_S))
    assert len(looks(bench, watch, ["source", "source"])) == 1


def test_of_many_ranks_that_change_at_once_some_have_a_line_each_and_the_others_share_one() -> None:
    told = looks(*watched(registered(dp_ranks=tuple(range(1000)))), ["never_heard", "never_heard"])
    assert len(told) == LOG_KEYS_MAX + 1


# ------------------------------------------------------------------------------------------------- the journal


def moves(bench: Bench) -> list[TrustMoved]:
    """Return a list to which the journal's records of trust are added from now on."""
    found = list[TrustMoved]()
    bench.routing.records.append(lambda what: found.append(what) if isinstance(what, TrustMoved) else None)
    return found


def test_every_change_is_a_record_of_the_journal_with_its_reason() -> None:
    bench, watch = watched()
    moved = moves(bench)
    looks(bench, watch, ["", "log_away", "log_away", "", ""])
    assert [(each.was, each.was_reason, each.trust, each.reason, each.requests) for each in moved] == [
        ("EXACT", "", "DEGRADED", "event log away", 0),
        ("DEGRADED", "event log away", "EXACT", "", 0),
    ]


def test_a_change_by_what_requests_show_has_the_evidence() -> None:
    bench, watch = watched(holds=2)
    moved = moves(bench)
    for _ in range(ENOUGH):  # each is reported to have reused nothing
        verdict = bench.routing.decide(route())
        bench.routing.take(verdict).end("ok")
        bench.routing.compare(verdict, 0)
    with capture_logs():
        watch.look()
        watch.look()
    (record,) = moved
    assert (record.trust, record.reason, record.was) == ("DEGRADED", "overpredicted", "EXACT")
    assert (record.requests, record.overpredicted, record.underpredicted) == (ENOUGH, ENOUGH, 0)
    assert record.newest_decision == "d-1"


class Watched:
    """A fleet, and what is logged of it."""

    def __init__(self, *workers: Any) -> None:
        self.bench, self.dumps = Bench(*workers), dict[WorkerRank, int]()
        self.watch = FleetWatch(self.bench.routing, lambda: dict(self.dumps))

    async def after(self, seconds: float = 0.0) -> list[tuple[Any, ...]]:
        """Return what a look so much later logs: event, level, worker and reason."""
        await self.bench.clock.advance(seconds)
        with capture_logs() as logged:
            self.watch.look()
        return [(line["event"], line["log_level"], line["worker"], line.get("reason")) for line in logged]

    async def marks(self, looks: int = 1) -> list[tuple[str, str]]:
        """Return kind and text of the marks of a look, or of several."""
        before = len(self.watch.marks)
        for _ in range(looks):
            await self.after()
        return [(each.kind, each.text) for each in [*self.watch.marks][before:]]

    def apply(self, event: FleetEvent) -> None:
        self.bench.state.apply(FleetApplied(now_s=self.bench.clock.now(), event=event))

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
    assert await watched.after() == [("worker_heard_again", "info", "w0", None), ("breaker_closed", "info", "w0", None)]


# ------------------------------------------------------------------------------------------------- marks


async def test_each_change_is_one_mark_and_the_first_look_says_only_that_the_router_started() -> None:
    watched, rank = Watched(registered(), registered("w1", instance="w1-1")), WorkerRank("w0", 0)
    watched.dumps[rank] = 3
    assert await watched.marks() == [("router_started", "the router began to watch")]
    assert await watched.marks() == []
    watched.apply(WorkerDraining(worker_id="w0", instance="w0-1"))
    watched.dumps |= {rank: 4, WorkerRank("w2", 0): 1}
    watched.bench.routing.set_policy(Policy(mode="predicted-ttft"))
    assert await watched.marks() == [
        ("policy", "mode kv -> predicted-ttft"),
        ("resync", "w0/0: the index took a complete dump"),
        ("worker_draining", "w0 drains"),
    ]
    watched.apply(WorkerLeft(worker_id="w0", instance="w0-1"))
    watched.apply(registered("w1", instance="w1-2"))
    watched.apply(registered("w2"))
    assert await watched.marks() == [
        ("worker_joined", "w1 joined again, as another instance"),
        ("worker_joined", "w2 joined"),
        ("worker_left", "w0 left"),
    ]


async def test_silence_and_trust_are_marks_when_they_are_logged_and_the_event_log_is_one_too() -> None:
    watched = Watched()
    await watched.marks()
    watched.bench.index.doubt = "behind"
    assert await watched.marks(2) == [("trust", "w0/0 EXACT -> DEGRADED: behind")]
    watched.bench.index.doubt = ""
    assert await watched.marks(2) == [("trust", "w0/0 DEGRADED -> EXACT")]
    await watched.bench.clock.advance(SILENT_S)
    assert await watched.marks() == [("worker_silent", "w0 is silent")]
    watched.bench.state.apply(LogConnection(now_s=watched.bench.clock.now(), heard=False))
    assert await watched.marks() == [("log_lost", "the event log is away")]
    watched.bench.state.apply(LogConnection(now_s=watched.bench.clock.now(), heard=True))
    assert await watched.marks() == [
        ("log_found", "the event log is connected again"),
        ("worker_heard", "w0 is heard again"),
    ]


async def test_many_changes_of_one_look_are_counted_beyond_the_bound() -> None:
    watched = Watched(registered(dp_ranks=tuple(range(MARKS_OF_A_LOOK + 7))))
    await watched.marks()
    watched.bench.index.doubt = "behind"
    *found, last = await watched.marks(2)
    assert (len(found), last) == (MARKS_OF_A_LOOK, ("others", "7 other changes"))


async def test_a_rank_that_begins_in_doubt_has_no_mark() -> None:
    watched = Watched()
    watched.bench.index.doubt = "behind"
    assert await watched.marks(3) == [("router_started", "the router began to watch")]


async def test_a_silent_worker_that_returns_as_another_instance_is_heard_again() -> None:
    watched = Watched(registered())
    await watched.marks()
    await watched.bench.clock.advance(SILENT_S)
    assert await watched.marks() == [("worker_silent", "w0 is silent")]
    watched.apply(registered(instance="w0-2"))
    assert await watched.marks() == [
        ("worker_joined", "w0 joined again, as another instance"),
        ("worker_heard", "w0 is heard again"),
    ]
