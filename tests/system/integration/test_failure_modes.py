"""What went wrong elsewhere between an engine and the log, by its number, on real sockets.

Source: `docs/SOURCES.md` E7.
"""

import pytest

from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker
from tests.system.integration.event_path import (
    chain_payloads,
    consolidator_on,
    played,
    publishing,
    running_agent,
    running_index,
    until_converged,
    zmq_context,
)


async def test_16_replay_brings_what_full_queues_and_a_late_subscription_lost(
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
