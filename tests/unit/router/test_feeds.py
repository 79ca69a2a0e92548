"""A worker that differs is named in the log, with every field; one of which an old log tells is waited for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent, Heartbeat, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LedgerApplied, LoadApplied, LogConnection, TimePassed, WorkerHeard
from kv_protocol.ledger import Expired, Finished, Routed
from kv_protocol.load import LoadReport, encode_load
from kv_runtime.clock import ManualClock
from kv_runtime.event_log import LogMessage, OnMessage
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.fleet.feeds import ACQUAINTED_S, RouterFeeds
from router.fleet.registry import RANKS_MAX
from router.journal.records import Recordable, Recorder
from tests.unit.router.samples import MODEL, registered, state


def routing(clock: ManualClock, recorder: Recorder | None = None) -> Routing:
    index: Any = None  # nobody asks it anything here
    return Routing(state(lease_s=1.0), index, clock, Policy(), seed=0, lease_s=1.0, decisions_max=1, recorder=recorder)


class Recorded:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Recordable] = []
        self._grown = asyncio.Event()

    def record(self, what: Recordable) -> None:
        self.records.append(what)
        self._grown.set()

    async def has(self, what: Recordable) -> None:
        """Return once it was recorded."""
        while what not in self.records:
            self._grown.clear()
            await self._grown.wait()


async def differences(*registrations: WorkerRegistered) -> list[tuple[Any, ...]]:
    """Return what was told of the fields of workers that joined one after the other."""
    log: Any = None  # nothing is read from it here
    clock = ManualClock()
    feeds = RouterFeeds(routing(clock), log, clock)
    with capture_logs() as logs:
        for each in registrations:
            message = LogMessage(subjects.fleet(MODEL, each.worker_id), fleet.encode(each))
            await feeds._on_fleet_event(message)
    told = [entry for entry in logs if entry["event"] == "worker_differs"]
    assert {entry["log_level"] for entry in told} <= {"error"}
    return [(entry["worker"], entry["field"], entry["found"], entry["allowed"]) for entry in told]


@pytest.mark.asyncio
async def test_a_worker_that_agrees_in_everything_is_no_news() -> None:
    assert await differences(registered(), registered("w1")) == []


async def pairings(*registrations: WorkerRegistered) -> list[tuple[str, str]]:
    """Return what was told of workers that do not go together, as they joined one after the other."""
    log: Any = None  # nothing is read from it here
    clock = ManualClock()
    feeds = RouterFeeds(routing(clock), log, clock)
    with capture_logs() as logs:
        for each in registrations:
            await feeds._on_fleet_event(LogMessage(subjects.fleet(MODEL, each.worker_id), fleet.encode(each)))
    told = [entry for entry in logs if entry["event"] == "workers_do_not_go_together"]
    assert all(entry["why"] and entry["fix"] for entry in told)
    return [(entry["of"], entry["found"]) for entry in told]


@pytest.mark.asyncio
async def test_what_does_not_go_together_is_told_once() -> None:
    prefill = registered("p", role="prefill", max_seq_len=9001, transfer_buffer_tokens=8192, kv_cache_dtype="fp8")
    decode = registered("d", role="decode", max_seq_len=9001, transfer_buffer_tokens=9216, kv_cache_dtype="fp8")
    assert await pairings(prefill, decode, decode) == [("p", "transfer_buffer_tokens 8192, the longest input has 9000")]
    other = registered("d", role="decode", kv_cache_dtype="bfloat16")
    assert await pairings(registered("p", role="prefill", kv_cache_dtype="fp8"), other) == [
        (MODEL, "prefill fp8: p; decode bfloat16: d")
    ]
    assert await pairings(registered(block_reuse=False)) == [
        ("w0", "block_reuse false, and the mode chooses by what workers hold")
    ]
    assert await pairings(registered(block_reuse=True), registered("w1")) == []


class OldLog:
    """A log whose fleet stream has something to tell; it is told at once."""

    def __init__(self, *told: WorkerRegistered) -> None:
        self._told = told

    async def listen(self, subject: str, on_message: OnMessage) -> None: ...

    async def follow(self, stream: str, subject: str, on_message: OnMessage) -> Any:
        del stream, subject
        for each in self._told:
            await on_message(LogMessage(subjects.fleet(MODEL, each.worker_id), fleet.encode(each)))
        return SimpleNamespace(unread=0)


async def begun(*told: WorkerRegistered) -> tuple[RouterFeeds, ManualClock]:
    log: Any = OldLog(*told)
    clock = ManualClock()
    feeds = RouterFeeds(routing(clock), log, clock)
    await feeds.start()
    return feeds, clock


@pytest.mark.asyncio
async def test_with_a_fleet_that_nobody_told_of_there_is_nobody_to_wait_for() -> None:
    feeds, _ = await begun()
    await feeds.acquainted(asyncio.Event())


@pytest.mark.asyncio
async def test_a_worker_that_the_log_told_of_is_waited_for_until_it_is_heard() -> None:
    feeds, clock = await begun(registered(), registered("w1"))
    waiting = asyncio.ensure_future(feeds.acquainted(asyncio.Event()))
    for worker_id in ("w0", "w1"):
        await clock.advance(ACQUAINTED_S / 4)
        assert not waiting.done()
        pulse = fleet.encode(Heartbeat(instance=registered(worker_id).instance, epoch=1, last_seq=0))
        await feeds._on_heartbeat(LogMessage(subjects.heartbeat(MODEL, WorkerRank(worker_id, 0)), pulse))
    await clock.advance(ACQUAINTED_S / 4)
    await waiting


@pytest.mark.asyncio
async def test_a_worker_that_is_not_heard_is_not_waited_for_for_ever() -> None:
    feeds, clock = await begun(registered())
    waiting = asyncio.ensure_future(feeds.acquainted(asyncio.Event()))
    await clock.advance(ACQUAINTED_S * 0.9)
    assert not waiting.done()
    await clock.advance(ACQUAINTED_S * 0.2)
    await waiting


@pytest.mark.asyncio
async def test_every_field_that_differs_is_told_with_what_was_found_and_what_is_allowed() -> None:
    odd = registered("w1", block_size=32, template_digest="x")
    assert await differences(registered(), odd) == [
        ("w1", "block_size", 32, 16),
        ("w1", "template_digest", "x", "template-1"),
    ]


class Connection:
    """The log's connection."""

    is_connected = True


@pytest.mark.asyncio
async def test_all_that_comes_is_recorded_in_the_order_in_which_it_was_applied() -> None:
    clock, log, recorded = ManualClock(), Connection(), Recorded()
    told: Any = log
    feeds = RouterFeeds(routing(clock, recorded), told, clock)
    del recorded.records[:]  # the policy
    report = LoadReport(
        instance="w0-1", iteration=1, running_requests=1, waiting_requests=0, used_blocks=1, total_blocks=9
    )
    pulse = fleet.encode(Heartbeat(instance="w0-1", epoch=1, last_seq=0))
    await feeds._on_fleet_event(LogMessage(subjects.fleet(MODEL, "w0"), fleet.encode(registered())))
    await feeds._on_heartbeat(LogMessage(subjects.heartbeat(MODEL, WorkerRank("w0", 0)), pulse))
    await feeds._on_load(LogMessage(subjects.load(MODEL, WorkerRank("w0", 0)), encode_load(report)))
    assert recorded.records == [
        FleetApplied(now_s=0.0, event=registered()),
        WorkerHeard(now_s=0.0, worker_id="w0", instance="w0-1"),
        LoadApplied(now_s=0.0, worker_id="w0", dp_rank=0, report=report),
    ]


@pytest.mark.asyncio
async def test_time_and_what_it_brings_and_the_logs_connection_are_recorded() -> None:
    clock, log, recorded, stop = ManualClock(), Connection(), Recorded(), asyncio.Event()
    router = routing(clock, recorded)
    router.tell(Routed(lease_id="l", worker_id="w0", dp_rank=0, blocks=b"", uncached_tokens=1))
    await clock.advance(1.0)
    del recorded.records[:]
    log.is_connected = False
    told: Any = log
    running = asyncio.ensure_future(RouterFeeds(router, told, clock).run(stop))
    await recorded.has(LedgerApplied(now_s=1.0, event=Expired(lease_id="l")))
    stop.set()
    await running
    assert recorded.records == [
        LogConnection(now_s=1.0, heard=False),
        TimePassed(now_s=1.0),
        LedgerApplied(now_s=1.0, event=Expired(lease_id="l")),
    ]


# ------------------------------------------------------------------------------------------------- refused events
def gated(*keys: bytes) -> tuple[RouterFeeds, ManualClock]:
    """Return the feeds of a router that nothing was said to yet; with keys it wants signatures."""
    log: Any = None  # nothing is read from it here
    clock = ManualClock()
    return RouterFeeds(routing(clock), log, clock, FleetGate(keys)), clock


def addresses(feeds: RouterFeeds) -> list[str]:
    return [worker.registration.base_url for worker in feeds._fleet.workers()]


@pytest.mark.asyncio
async def test_events_that_contradict_their_subject_or_their_instance_change_nothing_and_are_counted() -> None:
    feeds, _ = gated()
    subject, other = subjects.fleet(MODEL, "w0"), subjects.fleet(MODEL, "w1")
    forged = registered(base_url="http://10.6.6.6:1")
    left = fleet.encode(WorkerLeft(worker_id="w0", instance="w0-1"))
    true, false = fleet.encode(registered()), fleet.encode(forged)
    with capture_logs() as logs:
        for at, data in [(subject, true), (subject, false), (other, false), (other, left)]:
            await feeds._on_fleet_event(LogMessage(at, data))
    assert addresses(feeds) == ["http://127.0.0.1:1"]
    assert feeds.gate.refused_total | {"base_url": 1, "subject": 2} == feeds.gate.refused_total
    assert feeds.refused_messages_total == 3
    refused = [line for line in logs if line["event"] == "fleet_event_refused"]
    assert [line["cause"] for line in refused] == ["base_url", "subject"], "one line of each cause in ten seconds"
    assert "found http://10.6.6.6:1, allowed http://127.0.0.1:1 of instance w0-1" in refused[0]["reason"]


@pytest.mark.asyncio
async def test_refusals_of_one_cause_are_logged_once_in_ten_seconds_with_the_number_left_out() -> None:
    feeds, clock = gated()
    with capture_logs() as logs:
        for _ in range(5):
            await feeds._on_fleet_event(LogMessage(subjects.fleet(MODEL, "w0"), b"{"))
        await clock.advance(10.0)
        await feeds._on_fleet_event(LogMessage(subjects.fleet(MODEL, "w0"), b"{"))
    assert [line.get("suppressed") for line in logs] == [None, 4]


@pytest.mark.asyncio
async def test_with_a_key_only_signed_events_reach_the_fleet() -> None:
    feeds, _ = gated(b"k" * 32)
    subject, data = subjects.fleet(MODEL, "w0"), fleet.encode(registered())
    await feeds._on_fleet_event(LogMessage(subject, data))
    assert addresses(feeds) == []
    signed = FleetGate((b"k" * 32,)).headers(subject, "w0", data, 5)
    await feeds._on_fleet_event(LogMessage(subject, data, headers=signed))
    assert addresses(feeds) == ["http://127.0.0.1:1"]
    assert feeds.gate.refused_total["signature"] == 1


@pytest.mark.asyncio
async def test_messages_that_cannot_be_read_have_one_line_a_subject_and_period_and_then_their_number() -> None:
    feeds, clock = gated()
    subjects_heard = [subjects.heartbeat(MODEL, WorkerRank(worker_id, 0)) for worker_id in ("w0", "w1")]
    with capture_logs() as logs:
        for _ in range(3):
            for subject in subjects_heard:
                await feeds._on_heartbeat(LogMessage(subject, b"\xc1"))
        await clock.advance(10.0)
        await feeds._on_heartbeat(LogMessage(subjects_heard[0], b"\xc1"))
    assert feeds.refused_messages_total == 7
    assert [(line["event"], line["subject"], line.get("suppressed")) for line in logs] == [
        ("message_refused", subjects_heard[0], None),
        ("message_refused", subjects_heard[1], None),
        ("message_refused", subjects_heard[0], 2),
    ]
    assert all(line["reason"] for line in logs)


# --------------------------------------------------------------------------------- messages of what is not registered


async def heard_by(feeds: RouterFeeds, *events: FleetEvent) -> None:
    for each in events:
        await feeds._on_fleet_event(LogMessage(subjects.fleet(MODEL, each.worker_id), fleet.encode(each)))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [WorkerLeft, WorkerDraining])
async def test_the_end_of_another_instance_is_logged_as_refused_counted_and_not_recorded(kind: Any) -> None:
    log: Any = None
    recorded, clock = Recorded(), ManualClock()
    feeds = RouterFeeds(routing(clock, recorded), log, clock)
    await heard_by(feeds, registered())
    before = len(recorded.records)
    with capture_logs() as logs:
        await heard_by(feeds, *[kind(worker_id="w0", instance="forged")] * 5)
    assert [(line["event"], line["cause"]) for line in logs] == [("fleet_event_refused", "instance")]
    assert logs[0]["reason"] == "instance: found forged, allowed w0-1, the registered one"
    assert feeds.events_without_effect["instance"] == 5
    assert len(recorded.records) == before
    assert addresses(feeds) == ["http://127.0.0.1:1"]


@pytest.mark.asyncio
async def test_heartbeats_and_reports_of_what_is_not_registered_are_counted_and_leave_nothing_behind() -> None:
    log: Any = None
    recorded, clock = Recorded(), ManualClock()
    feeds = RouterFeeds(routing(clock, recorded), log, clock)
    await heard_by(feeds, registered())
    before = len(recorded.records)
    made_up = [(WorkerRank(f"x{at}", at % 7), "i") for at in range(50)]
    for rank, instance in [*made_up, (WorkerRank("w0", 0), "forged"), (WorkerRank("w0", 1), "w0-1")]:
        beat = fleet.encode(Heartbeat(instance=instance, epoch=1, last_seq=1))
        await feeds._on_heartbeat(LogMessage(subjects.heartbeat(MODEL, rank), beat))
        report = LoadReport(
            instance=instance, iteration=1, running_requests=9, waiting_requests=9, used_blocks=9, total_blocks=9
        )
        await feeds._on_load(LogMessage(subjects.load(MODEL, rank), encode_load(report)))
    heard = WorkerHeard(now_s=clock.now(), worker_id="w0", instance="w0-1")
    assert recorded.records[before:] == [heard], "the heartbeat of a registered instance, whatever its rank"
    assert feeds.unregistered_messages == {"heartbeat": 51, "load": 52}
    assert feeds._routing.state.ledger.loads() == {}


@pytest.mark.asyncio
async def test_registrations_beyond_the_bounds_leave_nothing_behind() -> None:
    feeds, _ = gated()
    ranks = tuple(range(4096))
    await heard_by(feeds, *(registered(f"x{at}", dp_ranks=ranks) for at in range(RANKS_MAX // 4096)))
    with capture_logs() as logs:
        await heard_by(feeds, *(registered(f"y{at}", dp_ranks=ranks) for at in range(20)))
    state_ = feeds._routing.state
    assert len(list(state_.fleet.workers())) == RANKS_MAX // 4096
    assert len(state_.newcomers.rows()) == RANKS_MAX
    assert feeds.events_without_effect["no_room"] == 20
    assert [(line["event"], line["cause"]) for line in logs] == [("fleet_event_refused", "no_room")]


def test_a_lease_of_another_router_on_an_unregistered_worker_leaves_nothing_behind_once_it_is_over() -> None:
    folded = state(lease_s=1.0)
    for at in range(20):
        routed = Routed(lease_id=f"l{at}", worker_id=f"x{at}", dp_rank=0, blocks=b"", uncached_tokens=5)
        folded.apply(LedgerApplied(now_s=1.0, event=routed, router="router-2"))
    assert len(folded.ledger.loads()) == 20
    for at in range(20):
        folded.apply(LedgerApplied(now_s=1.0, event=Finished(lease_id=f"l{at}"), router="router-2"))
    assert folded.ledger.loads() == {}
