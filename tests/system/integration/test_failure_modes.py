"""What went wrong elsewhere between an engine and the log, by its number, on real sockets.

Source: `docs/SOURCES.md` E7.
"""

import asyncio
import threading
from typing import Any

import pytest

from kv_protocol import subjects
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.supervise import run_parts
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import (
    RANK,
    chain_payloads,
    consolidator_on,
    everything,
    hashes_of,
    played,
    publishing,
    running_agent,
    running_index,
    scripted_source,
    until_converged,
    zmq_context,
)
from tests.system.integration.scripted_engine import ScriptedEngine
from worker_agent.engines.types import EngineError


@pytest.mark.asyncio
async def test_16_what_full_queues_and_a_late_subscription_lose_is_had_by_replay(
    broker: Broker, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_agent.events.engine_event_subscriber._HWM_MESSAGES", 1)
    messages = 3000
    async with zmq_context() as context, publishing(context, live_hwm=1) as engine:
        consolidator = consolidator_on(log, context, engine.at)
        await engine.store(messages // 2)
        async with running_agent(log, consolidator) as agent, running_index(broker.url) as index:
            await engine.store(messages // 2)
            await engine.until_read(agent)
            assert (len(agent.held()), agent.cursor.lost_total) == (messages, 0)
            assert agent.cursor.replays_total > 0
            await until_converged(index, agent)


@pytest.mark.asyncio
@pytest.mark.parametrize("topic", [(), (b"",), (b"kv-events",)], ids=["without topic", "empty topic", "topic"])
async def test_17_a_replay_of_many_answers_is_read_to_its_end_with_or_without_topics(
    log: EventLog, topic: tuple[bytes, ...]
) -> None:
    async with played(log) as (source, agent):
        source.topic = topic
        source.ring = chain_payloads(200)
        await source.live(199)
        await agent.until_read(200)
        assert (len(agent.held()), agent.cursor.lost_total) == (200, 0)
        assert agent.consolidator.readers[0].refused_messages_total == 0


class BusyEngine(ScriptedEngine):
    """An engine whose polls wait until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = 0
        self.answers = threading.Event()

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        self.polls += 1
        assert self.answers.wait(20)
        return super().kv_events(timeout_s)


@pytest.mark.asyncio
async def test_18_an_engine_that_does_not_answer_a_poll_blocks_nothing_else(log: EventLog) -> None:
    engine, stop, pulses = BusyEngine(), asyncio.Event(), list[LogMessage]()

    async def on_pulse(message: LogMessage) -> None:
        pulses.append(message)

    await log.listen(subjects.HEARTBEAT_ALL, on_pulse)
    async with zmq_context() as context, asyncio.TaskGroup() as group:
        path = scripted_source(log, context, engine).path
        await path.consolidator.start()
        group.create_task(run_parts(path.parts(0), stop=stop, drain_s=5.0))
        await eventually(lambda: engine.polls)
        pulses.clear()
        await eventually(lambda: len(pulses) > 1)
        assert engine.polls == 1
        engine.answers.set()
        stop.set()


class FailingEngine(ScriptedEngine):
    """Refuses its first polls."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self._failures = failures

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        if self._failures:
            self._failures -= 1
            raise EngineError("the executor is busy")
        return super().kv_events(timeout_s)


@pytest.mark.asyncio
async def test_28_polls_that_fail_and_events_that_make_no_sense_do_not_end_the_poller(
    broker: Broker, log: EventLog
) -> None:
    engine = FailingEngine(2)
    engine.store(1)
    engine.emit({"type": "stored", "blocks": None})
    engine.store(2, parent=1)
    async with everything(log, engine) as (source, _), running_index(broker.url) as index:
        assert await source.position() == {0: (100, 2)}
        assert source.poller.poll_failures_total == 2
        await eventually(lambda: {row.sequence_hash for row in index.held(RANK)} == set(hashes_of(1, 2)))
