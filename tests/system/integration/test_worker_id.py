"""Agents that share a worker id, and intruders that write to its subject, on a real nats-server."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bench.processes import ChildProcess
from kv_protocol import fleet, subjects
from kv_protocol.fleet import (
    HEARTBEAT_PERIOD_S,
    REMOVED_BY_HAND,
    FleetEvent,
    Heartbeat,
    WorkerDraining,
    WorkerLeft,
    WorkerRegistered,
)
from kv_protocol.fleet_gate import CLAIM_HEADER, SIGNATURE_HEADER, FleetGate
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.supervise import until
from tests.support.manual_clock import ManualClock
from tests.support.processes import agent_process
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.fleet_events import fleet_events
from tests.unit.router.samples import MODEL, registered
from worker_agent.fleet.membership import CHECK_PAUSE_S, CHECK_PERIOD_S, Membership
from worker_agent.fleet.worker_id import WorkerId, WorkerIdTaken
from worker_agent.fleet.worker_id_rules import SILENT_S

ID = "w0"
SUBJECT = subjects.fleet(MODEL, ID)
KEYS = (b"k" * 32,)
_ports = count(1)


class Agent:
    """A worker's place in the fleet, with the heartbeats that prove it alive."""

    def __init__(self, log: EventLog, instance: str, *, keys: Any = (), clock: Clock | None = None) -> None:
        self.log, self.clock = log, clock or Clock()
        self.registration = registered(ID, instance=instance, model=MODEL, base_url=f"http://127.0.0.1:{next(_ports)}")
        self.id = WorkerId(log, self.clock, FleetGate(keys), worker_id=ID, instance=instance)
        self.membership = Membership(self.registration, self.id, self.clock)

    async def register(self) -> bool:
        return await self.id.register(self.registration)

    async def beat(self) -> None:
        pulse = fleet.encode(Heartbeat(instance=self.registration.instance, epoch=1, last_seq=0))
        await self.log.announce(subjects.heartbeat(self.registration.model, WorkerRank(ID, 0)), pulse)

    async def live(self, stop: asyncio.Event) -> None:
        """Send heartbeats until `stop` is set."""
        while not stop.is_set():
            await self.beat()
            await until(stop, Clock().sleep(HEARTBEAT_PERIOD_S / 5))


@asynccontextmanager
async def living(agent: Agent) -> AsyncIterator[Agent]:
    """The agent's heartbeats come."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.live(stop))
        yield agent
        stop.set()


@asynccontextmanager
async def watching(agent: Agent) -> AsyncIterator[Agent]:
    """The agent lives, is registered, and watches its registration."""
    stop = asyncio.Event()
    async with living(agent), asyncio.TaskGroup() as group:
        group.create_task(agent.membership.run(stop))
        await eventually(lambda: agent.membership.is_registered)
        yield agent
        stop.set()


async def newest(log: EventLog) -> LogMessage:
    message = await log.message_from(subjects.FLEET_STREAM, 1, SUBJECT)
    assert message is not None
    return message


async def is_newest(log: EventLog, event: FleetEvent) -> None:
    """Return once the event is the newest of w0."""
    async with asyncio.timeout(20):
        while (await newest(log)).data != fleet.encode(event):
            await Clock().sleep(0.02)


def left(instance: str, reason: str = "stopped") -> WorkerLeft:
    return WorkerLeft(worker_id=ID, instance=instance, reason=reason)


# ------------------------------------------------------------------------------------------------- at the start
async def test_an_id_in_use_is_refused_with_the_other_s_instance_and_address(log: EventLog) -> None:
    async with living(Agent(log, "first")) as first:
        await first.register()
        second = Agent(log, "second")
        for refused in (second.id.check, second.register):
            with pytest.raises(WorkerIdTaken) as raised:
                await refused()
            assert str(raised.value) == (
                f"worker id w0 belongs to the living instance first at {first.registration.base_url}: "
                "stop that worker, or choose another id with --worker-id"
            )
        assert (await newest(log)).data == fleet.encode(first.registration)


async def test_the_id_of_a_dead_agent_at_whose_address_nothing_listens_is_taken_over_at_once(log: EventLog) -> None:
    dead = registered(ID, instance="dead", base_url="http://127.0.0.1:1", accepts_token_ids=True)
    await log.publish(SUBJECT, fleet.encode(dead))
    agent = Agent(log, "next", clock=ManualClock())
    await agent.id.check()
    await agent.register()
    assert (await newest(log)).data == fleet.encode(agent.registration)


@pytest.mark.parametrize("is_engine_s", [False, True])
async def test_the_id_of_an_instance_whose_address_says_nothing_is_taken_over_after_five_missed_heartbeats(
    log: EventLog, is_engine_s: bool
) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = 1 if is_engine_s else server.sockets[0].getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    dead = registered(ID, instance="dead", base_url=address, accepts_token_ids=not is_engine_s)
    await log.publish(SUBJECT, fleet.encode(dead))
    clock = ManualClock()
    agent = Agent(log, "next", clock=clock)
    checking = asyncio.ensure_future(agent.id.check())
    while not checking.done():
        await eventually(lambda: clock.sleepers or checking.done())
        before_s = clock.now()
        await clock.advance(0.05)
    await checking
    assert SILENT_S <= before_s <= SILENT_S + 0.1
    await agent.register()
    assert (await newest(log)).data == fleet.encode(agent.registration)
    server.close()


# ------------------------------------------------------------------------------------------------- while it runs
async def test_a_registration_that_an_intruder_replaces_is_published_again_and_the_log_names_it(log: EventLog) -> None:
    with capture_logs() as logs:
        async with watching(Agent(log, "first")) as first:
            intruder = registered(ID, instance="intruder", base_url="http://10.6.6.6:1")
            await log.publish(SUBJECT, fleet.encode(intruder))
            await is_newest(log, first.registration)
            await log.publish(SUBJECT, b"garbage")
            await is_newest(log, first.registration)
            await eventually(lambda: first.membership.repairs_total == 2)
    replaced = [line for line in logs if line["event"] == "registration_replaced"]
    assert (replaced[0]["by_instance"], replaced[0]["by_address"]) == ("intruder", "http://10.6.6.6:1")
    assert "malformed" in replaced[1]["refused"]


async def test_a_forged_address_of_the_own_instance_is_withdrawn_before_the_true_one_is_registered(
    log: EventLog,
) -> None:
    async with watching(Agent(log, "first")) as first, fleet_events(log) as told:
        forged = registered(ID, instance="first", base_url="http://10.6.6.6:1")
        await log.publish(SUBJECT, fleet.encode(forged))
        await eventually(lambda: len(told) == 3)
        assert told == [forged, left("first", "registration forged"), first.registration]


@pytest.mark.parametrize(("reason", "is_repaired"), [("forged", True), (REMOVED_BY_HAND, False)])
async def test_only_an_operator_removes_a_living_worker(log: EventLog, reason: str, is_repaired: bool) -> None:
    clock = ManualClock()
    agent = Agent(log, "first", clock=clock)
    async with watching(agent):
        await eventually(lambda: clock.sleepers)
        await log.publish(SUBJECT, fleet.encode(left("first", reason)))
        for _ in range(3):
            await clock.advance(CHECK_PERIOD_S + CHECK_PAUSE_S)
            await eventually(lambda: clock.sleepers)
        await is_newest(log, agent.registration if is_repaired else left("first", reason))
        assert agent.membership.repairs_total == is_repaired


async def test_an_intruder_makes_an_agent_publish_once_a_second_at_most(log: EventLog) -> None:
    clock = ManualClock()
    agent = Agent(log, "first", clock=clock)

    async def has_repaired(times: int) -> None:
        await eventually(lambda: agent.membership.repairs_total == times)

    async with watching(agent):
        for repairs in range(2):
            for each in range(20):
                await log.publish(SUBJECT, fleet.encode(registered(ID, instance=f"intruder-{each}")))
            await eventually(lambda: clock.sleepers)
            assert agent.membership.repairs_total == repairs
            await clock.advance(CHECK_PAUSE_S)
            await has_repaired(repairs + 1)


# ------------------------------------------------------------------------------------------------- two agents
async def test_an_instance_that_was_thought_dead_and_returns_keeps_the_id_and_the_later_one_stops(
    log: EventLog,
) -> None:
    clock = ManualClock()
    first, second = Agent(log, "first"), Agent(log, "second", clock=clock)
    await first.register()
    stop = asyncio.Event()
    second_run = asyncio.ensure_future(second.membership.run(stop))
    while not second.membership.is_registered:
        await clock.advance(0.05)
        await eventually(lambda: clock.sleepers)
    assert (await newest(log)).data == fleet.encode(second.registration)
    async with living(first):
        first_run = asyncio.ensure_future(first.membership.run(stop))  # its connection is back
        while not second_run.done():
            await clock.advance(0.05)
            await eventually(lambda: clock.sleepers or second_run.done())
        with pytest.raises(WorkerIdTaken, match="instance first at "):
            await second_run
        await is_newest(log, first.registration)
        assert ((await newest(log)).headers or {})[CLAIM_HEADER] == "1"
        await second.membership.leave("stopped")
        assert (await newest(log)).data == fleet.encode(first.registration)
        stop.set()
        await first_run


# ------------------------------------------------------------------------------------------------- drained by hand
async def test_an_operator_s_drain_of_another_instance_is_not_this_one_s(log: EventLog) -> None:
    clock = ManualClock()
    agent, drained = Agent(log, "first", clock=clock), WorkerDraining(worker_id=ID, instance="other", by_hand=True)
    await log.publish(subjects.fleet("another-model", ID), fleet.encode(drained))
    registering = asyncio.ensure_future(agent.register())
    while not registering.done():
        await clock.advance(0.5)
        await eventually(lambda: clock.sleepers or registering.done())
    assert not await agent.register()
    await log.purge(subjects.FLEET_STREAM, (await newest(log)).stream_seq)
    assert await agent.register()
    assert (await newest(log)).data == fleet.encode(agent.registration)


async def test_an_agent_keeps_an_operator_s_drain_in_a_new_log_and_until_it_is_put_back(log: EventLog) -> None:
    agent, draining = Agent(log, "first"), WorkerDraining(worker_id=ID, instance="first", by_hand=True)
    await agent.register()
    await log.publish(SUBJECT, fleet.encode(draining))
    drained, put_back = replace(agent.registration, drained=True), replace(agent.registration, ends_drain=True)
    assert not await agent.register()
    assert (await newest(log)).data == fleet.encode(draining)
    await log.purge(subjects.FLEET_STREAM, (await newest(log)).stream_seq)
    assert await agent.register()
    for _ in range(2):
        assert (await newest(log)).data == fleet.encode(drained)
        assert not await agent.register()
    await log.publish(SUBJECT, fleet.encode(put_back))
    assert not await agent.register()
    assert (await newest(log)).data == fleet.encode(put_back)
    await log.purge(subjects.FLEET_STREAM, (await newest(log)).stream_seq)
    assert await agent.register()
    assert (await newest(log)).data == fleet.encode(agent.registration)
    another = Agent(log, "second")
    await agent.id.publish_event(MODEL, left("first"))
    await another.register()
    assert (await newest(log)).data == fleet.encode(another.registration)


# ------------------------------------------------------------------------------------------------- keys
async def test_with_a_key_every_event_of_an_agent_is_signed_and_unsigned_rivals_do_not_count(log: EventLog) -> None:
    reader = FleetGate(KEYS)
    intruder = Agent(log, "intruder")
    async with living(intruder):
        await log.publish(SUBJECT, fleet.encode(intruder.registration))
        async with watching(Agent(log, "first", keys=KEYS)) as first:
            assert admitted(reader, await newest(log)) == first.registration
            await log.publish(SUBJECT, fleet.encode(intruder.registration))
            await is_newest(log, first.registration)
            assert admitted(reader, await newest(log)) == first.registration
        draining = await newest(log)
        await first.membership.leave("stopped")
        for message in (draining, await newest(log)):
            assert {CLAIM_HEADER, SIGNATURE_HEADER} <= set(message.headers or {})
            admitted(reader, message)


def admitted(gate: FleetGate, message: LogMessage) -> FleetEvent:
    return gate.admit(message.subject, message.data, message.headers)


# ------------------------------------------------------------------------------------------------- processes
def simulated(nats_url: str) -> ChildProcess:
    return agent_process(ID, nats_url)


async def test_a_second_process_under_a_living_id_ends_with_one_sentence_and_the_first_stays(
    broker: Broker, log: EventLog
) -> None:
    async with fleet_events(log) as told, asyncio.TaskGroup() as group:
        first, second = simulated(broker.url), simulated(broker.url)
        await first.start(group)
        await first.line_with("worker_registered")
        await eventually(lambda: bool(told))
        (registration,) = told
        assert isinstance(registration, WorkerRegistered)
        await second.start(group)
        assert await second.until_ended() == 1
        assert f"worker-agent: worker id w0 belongs to the living instance {registration.instance}" in second.output
        assert told == [registration]
        await first.end(signal.SIGTERM)
