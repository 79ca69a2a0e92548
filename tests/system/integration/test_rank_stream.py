"""A rank's outbox into a real log: whatever the server does, all that was not dropped is there, once and in order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import nats
from nats.js import JetStreamContext
from structlog.testing import capture_logs

from indexer.embedded import ensure_streams
from kv_protocol import subjects
from kv_protocol.events import Cleared, Stored
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from kv_runtime.tracing.service import EventTracing
from tests.support.parts import at_work
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import MODEL, NATS, RANK, batches_in
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
        await eventually(lambda: not self.outbox.waiting_bytes)

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
        each = Publishing(log, outbox, RankStreamSender(MODEL, RANK, outbox, log, SystemClock(), tracing=tracing))
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
