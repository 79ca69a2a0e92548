"""A worker that differs is named in the log, with every field; one of which an old log tells is waited for."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from structlog.testing import capture_logs

from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent, Heartbeat, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    TimePassed,
    WorkerHeard,
)
from kv_protocol.ledger import Expired, Finished, Routed
from kv_protocol.load import LoadReport, encode_load
from kv_runtime.event_log import EventLog, LogMessage, OnMessage
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.feeds.feeds import ACQUAINTED_S, RouterFeeds
from router.fleet.registry import RANKS_MAX
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import MODEL, registered, state


def routing(clock: ManualClock, *recorders: Callable[[JournalRecord], object]) -> Routing:
    index: Any = None  # no test here queries it
    return Routing(
        state(lease_s=1.0), index, clock, Policy(), seed=0, lease_s=1.0, decisions_max=1, recorders=recorders
    )


class Kept:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.records: list[JournalRecord] = []
        self._grown = asyncio.Event()

    def record(self, what: JournalRecord) -> None:
        self.records.append(what)
        self._grown.set()

    async def has(self, what: JournalRecord) -> None:
        """Return once it was recorded."""
        while what not in self.records:
            self._grown.clear()
            await self._grown.wait()


class Log:
    """The event log: its fleet stream holds registrations at the start, `say` publishes a message to its readers."""

    def __init__(self, *told: WorkerRegistered) -> None:
        self._told = told
        self._readers: dict[str, OnMessage] = {}
        self.is_connected, self.followed = True, asyncio.Event()

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        self._readers[subject.partition("*")[0].removesuffix(">")] = on_message

    async def follow(self, stream: str, subject: str, on_message: OnMessage) -> Any:
        del stream
        await self.listen(subject, on_message)
        await self.join(*self._told)
        self.followed.set()
        return SimpleNamespace(unread=0)

    async def say(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        for prefix, on_message in self._readers.items():
            if subject.startswith(prefix):
                await on_message(LogMessage(subject, data, headers=headers))

    async def join(self, *events: FleetEvent) -> None:
        for each in events:
            await self.say(subjects.fleet(MODEL, each.worker_id), fleet.encode(each))

    async def beat(self, rank: WorkerRank, instance: str) -> None:
        pulse = Heartbeat(instance=instance, epoch=1, last_seq=0)
        await self.say(subjects.heartbeat(MODEL, rank), fleet.encode(pulse))

    async def report(self, rank: WorkerRank, report: LoadReport) -> None:
        await self.say(subjects.load(MODEL, rank), encode_load(report))


class Begun(NamedTuple):
    """Feeds that read `log` since `start`."""

    feeds: RouterFeeds
    log: Log
    clock: ManualClock
    routing: Routing
    recorded: Kept
    looked_s: list[float]

    def addresses(self) -> list[str]:
        return [worker.registration.base_url for worker in self.routing.state.fleet.workers()]


async def begun(*told: WorkerRegistered, keys: tuple[bytes, ...] = ()) -> Begun:
    """Return the feeds of a router that was told of these workers; with keys it wants signatures."""
    log, clock, recorded, looked_s = Log(*told), ManualClock(), Kept(), list[float]()
    routing_, looks = routing(clock, recorded.record), (lambda: looked_s.append(clock.now()),)
    feeds = RouterFeeds(routing_, cast("EventLog", log), FleetGate(keys), looks)
    await feeds.start()
    return Begun(feeds, log, clock, routing_, recorded, looked_s)


async def lines(event: str, *registrations: FleetEvent) -> list[Any]:
    """Return the lines of this event that were logged as workers joined one after the other."""
    router = await begun()
    with capture_logs() as logs:
        await router.log.join(*registrations)
    return [entry for entry in logs if entry["event"] == event]


async def pairings(*registrations: FleetEvent) -> list[tuple[str, str]]:
    """Return what was told of workers that do not go together, as they joined one after the other."""
    told = await lines("workers_do_not_go_together", *registrations)
    assert all(entry["why"] and entry["fix"] for entry in told)
    return [(entry["of"], entry["found"]) for entry in told]


async def test_a_pair_that_forms_again_is_told_again() -> None:
    prefill = registered("p", role="prefill", kv_cache_dtype="fp8")
    decode = registered("d", role="decode", kv_cache_dtype="bfloat16")
    left = WorkerLeft(worker_id="d", instance=decode.instance)
    assert len(await pairings(prefill, decode, left, decode)) == 2


async def test_what_does_not_go_together_is_told_once() -> None:
    prefill = registered("p", role="prefill", max_seq_len=9001, transfer_buffer_tokens=8192, kv_cache_dtype="fp8")
    decode = registered("d", role="decode", max_seq_len=9001, transfer_buffer_tokens=9216, kv_cache_dtype="fp8")
    assert await pairings(prefill, decode, decode) == [("p", "transfer_buffer_tokens 8192, the longest input has 9000")]
    other = registered("d", role="decode", kv_cache_dtype="bfloat16")
    assert await pairings(registered("p", role="prefill", kv_cache_dtype="fp8"), other) == [
        (MODEL, "kv_cache_dtype: prefill fp8: p; decode bfloat16: d")
    ]
    assert await pairings(registered(), registered("w1")) == []


async def test_a_worker_that_the_log_told_of_is_waited_for_until_it_is_heard() -> None:
    router = await begun(registered(), registered("w1"))
    waiting = asyncio.ensure_future(router.feeds.acquainted(asyncio.Event()))
    for worker_id in ("w0", "w1"):
        await router.clock.advance(ACQUAINTED_S / 4)
        assert not waiting.done()
        await router.log.beat(WorkerRank(worker_id, 0), registered(worker_id).instance)
    await router.clock.advance(ACQUAINTED_S / 4)
    await waiting
    await (await begun()).feeds.acquainted(asyncio.Event())  # without a worker there is none to wait for


async def test_a_worker_that_is_not_heard_is_not_waited_for_for_ever() -> None:
    router = await begun(registered())
    waiting = asyncio.ensure_future(router.feeds.acquainted(asyncio.Event()))
    await router.clock.advance(ACQUAINTED_S * 0.9)
    assert not waiting.done()
    await router.clock.advance(ACQUAINTED_S * 0.2)
    await waiting


async def test_every_field_that_differs_is_told_with_what_was_found_and_what_is_allowed() -> None:
    told = await lines("worker_differs", registered(), registered("w1", block_size=32, template_digest="x"))
    assert [(each["log_level"], each["worker"], each["field"], each["found"], each["allowed"]) for each in told] == [
        ("error", "w1", "block_size", 32, 16),
        ("error", "w1", "template_digest", "x", "template-1"),
    ]


async def test_all_that_comes_is_recorded_in_the_order_in_which_it_was_applied() -> None:
    router = await begun()
    del router.recorded.records[:]  # the policy
    report = LoadReport(
        instance="w0-1", iteration=1, running_requests=1, waiting_requests=0, used_blocks=1, total_blocks=9
    )
    await router.log.join(registered())
    await router.log.beat(WorkerRank("w0", 0), "w0-1")
    await router.log.report(WorkerRank("w0", 0), report)
    assert router.recorded.records == [
        FleetApplied(now_s=0.0, event=registered()),
        WorkerHeard(now_s=0.0, worker_id="w0", instance="w0-1"),
        LoadApplied(now_s=0.0, worker_id="w0", dp_rank=0, report=report),
    ]


async def test_time_and_what_it_brings_and_the_logs_connection_are_recorded() -> None:
    router, stop = await begun(), asyncio.Event()
    recorded = router.recorded
    routed = Routed(lease_id="l", worker_id="w0", dp_rank=0, blocks=b"", uncached_tokens=1)
    router.routing.apply(LedgerApplied(now_s=router.clock.now(), event=routed))
    await router.clock.advance(1.0)
    del recorded.records[:]
    router.log.is_connected = False
    running = asyncio.ensure_future(router.feeds.run(stop))
    await recorded.has(LedgerApplied(now_s=1.0, event=Expired(lease_id="l")))
    stop.set()
    await running
    assert router.looked_s == [1.0]
    assert recorded.records == [
        LogConnection(now_s=1.0, heard=False),
        TimePassed(now_s=1.0),
        LedgerApplied(now_s=1.0, event=Expired(lease_id="l")),
    ]


# ------------------------------------------------------------------------------------------------- refused events


async def test_events_that_contradict_their_subject_or_their_instance_change_nothing_and_are_counted() -> None:
    router = await begun()
    subject, other = subjects.fleet(MODEL, "w0"), subjects.fleet(MODEL, "w1")
    forged = registered(base_url="http://10.6.6.6:1")
    left = fleet.encode(WorkerLeft(worker_id="w0", instance="w0-1"))
    true, false = fleet.encode(registered()), fleet.encode(forged)
    with capture_logs() as logs:
        for at, data in [(subject, true), (subject, false), (other, false), (other, left)]:
            await router.log.say(at, data)
    refused_total = router.feeds.gate.refused_total
    assert router.addresses() == ["http://127.0.0.1:1"]
    assert refused_total | {"base_url": 1, "subject": 2} == refused_total
    assert router.feeds.refused_messages_total == 3
    refused = [line for line in logs if line["event"] == "fleet_event_refused"]
    assert [line["cause"] for line in refused] == ["base_url", "subject"], "one line of each cause in ten seconds"
    assert "found http://10.6.6.6:1, allowed http://127.0.0.1:1 of instance w0-1" in refused[0]["reason"]


async def test_with_a_key_only_signed_events_reach_the_fleet() -> None:
    router = await begun(keys=(b"k" * 32,))
    subject, data = subjects.fleet(MODEL, "w0"), fleet.encode(registered())
    await router.log.say(subject, data)
    assert router.addresses() == []
    signed = FleetGate((b"k" * 32,)).headers(subject, "w0", data, 5)
    await router.log.say(subject, data, signed)
    assert router.addresses() == ["http://127.0.0.1:1"]
    assert router.feeds.gate.refused_total["signature"] == 1


async def test_messages_that_cannot_be_read_have_one_line_a_subject_and_period_and_then_their_number() -> None:
    router = await begun()
    subjects_heard = [subjects.heartbeat(MODEL, WorkerRank(worker_id, 0)) for worker_id in ("w0", "w1")]
    with capture_logs() as logs:
        for _ in range(3):
            for subject in subjects_heard:
                await router.log.say(subject, b"\xc1")
        await router.clock.advance(10.0)
        await router.log.say(subjects_heard[0], b"\xc1")
    assert router.feeds.refused_messages_total == 7
    assert [(line["event"], line["subject"], line.get("suppressed")) for line in logs] == [
        ("message_refused", subjects_heard[0], None),
        ("message_refused", subjects_heard[1], None),
        ("message_refused", subjects_heard[0], 2),
    ]
    assert all(line["reason"] for line in logs)


# --------------------------------------------------------------------------------- messages of what is not registered


@pytest.mark.parametrize("kind", [WorkerLeft, WorkerDraining])
async def test_the_end_of_another_instance_is_logged_as_refused_counted_and_not_recorded(kind: Any) -> None:
    router = await begun(registered())
    before = len(router.recorded.records)
    with capture_logs() as logs:
        await router.log.join(*[kind(worker_id="w0", instance="forged")] * 5)
    assert [(line["event"], line["cause"]) for line in logs] == [("fleet_event_refused", "instance")]
    assert logs[0]["reason"] == "instance: found forged, allowed w0-1, the registered one"
    assert router.feeds.events_without_effect["instance"] == 5
    assert len(router.recorded.records) == before
    assert router.addresses() == ["http://127.0.0.1:1"]


@pytest.mark.parametrize(("waited_s", "reason"), [(0.0, ""), (ACQUAINTED_S, "no heartbeat yet")])
async def test_a_heartbeat_that_overtook_its_registration_counts_for_two_periods(waited_s: float, reason: str) -> None:
    router = await begun()
    await router.log.beat(WorkerRank("w0", 0), registered().instance)
    await router.clock.advance(waited_s)
    await router.log.join(registered())
    state = router.routing.state
    assert [state.fleet.unfit(worker, router.clock.now()) for worker in state.fleet.workers()] == [reason]


async def test_heartbeats_and_reports_of_what_is_not_registered_are_counted_and_leave_nothing_behind() -> None:
    router = await begun(registered())
    before = len(router.recorded.records)
    made_up = [(WorkerRank(f"x{at}", at % 7), "i") for at in range(50)]
    for rank, instance in [*made_up, (WorkerRank("w0", 0), "forged"), (WorkerRank("w0", 1), "w0-1")]:
        await router.log.beat(rank, instance)
        report = LoadReport(
            instance=instance, iteration=1, running_requests=9, waiting_requests=9, used_blocks=9, total_blocks=9
        )
        await router.log.report(rank, report)
    heard = WorkerHeard(now_s=router.clock.now(), worker_id="w0", instance="w0-1")
    assert router.recorded.records[before:] == [heard], "the heartbeat of a registered instance, whatever its rank"
    assert router.feeds.unregistered_messages == {"heartbeat": 51, "load": 52}
    assert router.routing.state.loads() == {}


async def test_registrations_beyond_the_bounds_leave_nothing_behind() -> None:
    router = await begun()
    ranks = tuple(range(4096))
    await router.log.join(*(registered(f"x{at}", dp_ranks=ranks) for at in range(RANKS_MAX // 4096)))
    with capture_logs() as logs:
        await router.log.join(*(registered(f"y{at}", dp_ranks=ranks) for at in range(20)))
    state_ = router.routing.state
    assert len(list(state_.fleet.workers())) == RANKS_MAX // 4096
    assert state_.core.rank_count == RANKS_MAX
    assert router.feeds.events_without_effect["no_room"] == 20
    assert [(line["event"], line["cause"]) for line in logs] == [("fleet_event_refused", "no_room")]


def test_a_lease_of_another_router_on_an_unregistered_worker_leaves_nothing_behind_once_it_is_over() -> None:
    folded = state(lease_s=1.0)
    for at in range(20):
        routed = Routed(lease_id=f"l{at}", worker_id=f"x{at}", dp_rank=0, blocks=b"", uncached_tokens=5)
        folded.apply(LedgerApplied(now_s=1.0, event=routed, router="router-2"))
    assert len(folded.loads()) == 20
    for at in range(20):
        folded.apply(LedgerApplied(now_s=1.0, event=Finished(lease_id=f"l{at}"), router="router-2"))
    assert folded.loads() == {}
