"""A rank's outbox into a real log: all that was not dropped is there, once and in order; its way as one trace."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time_ns
from typing import Any

import nats
from nats.js import JetStreamContext
from structlog.testing import capture_logs

from indexer.embedded import ensure_streams
from kv_protocol import subjects
from kv_protocol.events import Cleared, Stored
from kv_protocol.trace_context import event_trace
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from kv_runtime.tracing.service import EventTracing
from kv_runtime.tracing.spans import TraceData
from tests.support.parts import at_work
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import MODEL, NATS, RANK, batches_in
from tests.system.integration.index_on_log import Index, running_index
from worker_agent.events.outbox import SMALL_MAX, Outbox
from worker_agent.events.rank_stream import RankStreamSender

EPOCH = 7
TOLD = ("publish_failed", "published_again")


@dataclass
class Publishing:
    """An outbox on its way into the log."""

    log: EventLog
    outbox: Outbox
    stream: RankStreamSender

    def add(self, batches: int = 1, blocks: int = 0) -> None:
        for _ in range(batches):
            event = Stored(tuple(range(1, 1 + blocks))) if blocks else Cleared()
            self.outbox.add(event, source_seq=0, engine_time_ns=0)
        self.stream.wake()

    async def until_published(self) -> None:
        await eventually(lambda: not self.outbox.unacked_bytes)

    async def until_unconfirmed(self, messages: int) -> None:
        await eventually(lambda: self.log.statistics().unconfirmed == messages)


@asynccontextmanager
async def publishing(
    url: str, *, confirm_s: float = 5.0, tracing: EventTracing | None = None
) -> AsyncIterator[Publishing]:
    """A stream whose part runs, and the watch over its connection, which makes a lost KV_EVENTS again."""
    log = await EventLog.connect(url, name="test", confirm_s=confirm_s)
    try:
        await ensure_streams(log, NATS)
        outbox = Outbox(EPOCH)
        each = Publishing(log, outbox, RankStreamSender(MODEL, RANK, outbox, log, Clock(), tracing=tracing))
        async with at_work(Part("publish", each.stream.run), Part("event-log", log.run, 1)):
            yield each
    finally:
        await log.close()


@asynccontextmanager
async def jetstream(url: str) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def seqs_in(broker: Broker) -> list[int]:
    return [batch.seq for batch in await batches_in(broker.url)]


def told(lines: list[Any]) -> list[str]:
    return [line["event"] for line in lines if line["event"] in TOLD and line["log_level"] != "debug"]


async def test_a_message_does_not_wait_for_those_before_it_to_be_confirmed(broker: Broker) -> None:
    async with publishing(broker.url) as each:
        broker.freeze()
        while (unconfirmed := each.log.statistics().unconfirmed) < SMALL_MAX:
            each.add()
            await each.until_unconfirmed(unconfirmed + 1)
        each.add(5)
        broker.thaw()
        await each.until_published()
    assert await seqs_in(broker) == list(range(1, SMALL_MAX + 6))


async def test_without_a_stream_it_is_told_once_and_all_is_published_when_there_is_one(broker: Broker) -> None:
    async with publishing(broker.url) as each, jetstream(broker.url) as server:
        await server.delete_stream(subjects.EVENTS_STREAM)
        with capture_logs() as lines:
            each.add(5)
            await eventually(lambda: each.stream.failures_total > 2)
            each.add(5)
            await ensure_streams(each.log, NATS)
            await each.until_published()
        assert told(lines) == ["publish_failed", "published_again"]
        assert "no stream takes this subject" in next(line["reason"] for line in lines if "reason" in line)
    assert await seqs_in(broker) == list(range(1, 11))


SECOND_NS = 1_000_000_000
AGENT = ("kv_events", "consolidate", "outbox", "publish")
ALL = 1.0


@dataclass
class Way:
    """A rank's outbox on its way into the log, an index that follows the log, and what both traced."""

    agent: Publishing
    index: Index
    by_agent: list[TraceData]
    by_index: list[TraceData]

    async def publish(self, blocks: tuple[int, ...], engine_ns: int = 0) -> None:
        """These blocks, flushed by the engine then, are a message of their own."""
        self.agent.outbox.add(Stored(blocks), source_seq=0, engine_time_ns=engine_ns)
        self.agent.stream.wake()

    async def until_applied(self) -> None:
        await self.agent.until_published()
        async with asyncio.timeout(10):
            await self.index.index.wait_for(RANK, EPOCH, self.agent.outbox.last_seq)


@asynccontextmanager
async def way(url: str) -> AsyncIterator[Way]:
    by_agent, by_index = list[TraceData](), list[TraceData]()
    async with running_index(url, tracing=EventTracing(ALL, by_index.append)) as index:
        await eventually(lambda: not index.index.catching_up())
        async with publishing(url, confirm_s=0.2, tracing=EventTracing(ALL, by_agent.append)) as agent:
            yield Way(agent, index, by_agent, by_index)


def names(trace: TraceData) -> tuple[str, ...]:
    return tuple(span.name for span in trace.spans)


async def test_engine_agent_log_and_index_are_one_tree_of_a_message(broker: Broker) -> None:
    engine_ns = time_ns() - SECOND_NS
    async with way(broker.url) as each:
        await each.publish((1, 2, 3), engine_ns)
        await each.until_applied()
    (sent,), (applied,) = each.by_agent, each.by_index
    assert names(sent) == AGENT
    assert names(applied) == ("apply",)
    ids = event_trace(RANK, EPOCH, 1)
    root, consolidate, outbox, publish = sent.spans
    assert (sent.trace_id, sent.parent_id, root.span_id) == (ids.trace_id, 0, ids.span_id)
    assert (applied.trace_id, applied.parent_id) == (ids.trace_id, root.span_id)
    assert root.start_ns == consolidate.start_ns == engine_ns
    assert consolidate.end_ns == outbox.start_ns <= outbox.end_ns == publish.start_ns <= publish.end_ns == root.end_ns
    assert publish.start_ns <= applied.spans[0].start_ns <= applied.spans[0].end_ns
    assert (publish.kind, applied.spans[0].kind) == ("producer", "consumer")
    assert (
        root.attributes.items()
        >= {
            "messaging.destination.name": subjects.events(MODEL, RANK),
            "messaging.batch.message_count": 1,
            "kvrouter.worker": RANK.worker_id,
            "kvrouter.dp_rank": RANK.dp_rank,
            "kvrouter.first_seq": 1,
            "kvrouter.last_seq": 1,
            "kvrouter.blocks": 3,
        }.items()
    )
    assert applied.spans[0].attributes["kvrouter.outcome"] == "applied"
    assert len({span.span_id for span in (*sent.spans, *applied.spans)}) == 5


async def test_a_message_that_was_sent_again_has_one_trace_with_its_attempts(broker: Broker) -> None:
    async with way(broker.url) as each:
        broker.freeze()
        await each.publish((1,))
        await eventually(lambda: each.agent.stream.failures_total >= 2)
        broker.thaw()
        await each.until_applied()
    (sent,) = each.by_agent
    attempts = sent.spans[3].attributes["kvrouter.attempts"]
    assert isinstance(attempts, int)
    assert attempts > 1
    assert len(each.by_index) == 1
