"""A connection to a real nats-server, and a reader that keeps what it is told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kv_runtime.event_log import CONFIRM_S, BrokerUnavailable, EventLog, LogMessage, StreamSpec
from tests.system.integration.broker import eventually

STREAM = StreamSpec("TEST", ("test.>",), max_age_s=3600, max_bytes=1 << 20)


class Reader:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.messages: list[LogMessage] = []

    async def on_message(self, message: LogMessage) -> None:
        self.messages.append(message)

    @property
    def data(self) -> list[bytes]:
        return [message.data for message in self.messages]

    async def until(self, expected: Sequence[bytes]) -> None:
        await eventually(lambda: len(self.messages) >= len(expected), f"{self.data} != {list(expected)}")
        assert self.data == list(expected)


@asynccontextmanager
async def connected(url: str, confirm_s: float = CONFIRM_S) -> AsyncIterator[EventLog]:
    """An event log whose `run` runs."""
    log = await EventLog.connect(url, name="test", confirm_s=confirm_s)
    stop = asyncio.Event()
    running = asyncio.ensure_future(log.run(stop))
    try:
        yield log
        stop.set()
        await running
    finally:
        running.cancel()
        await log.close()


def numbers(first: int, last: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, last + 1)]


async def reader_of(log: EventLog, payloads: Sequence[bytes] = ()) -> Reader:
    """Make the stream, follow it, and publish these; return the reader once it has them."""
    reader = Reader()
    await log.ensure_stream(STREAM)
    await log.follow("TEST", "test.>", reader.on_message)
    await publish_all(log, payloads)
    await reader.until(payloads)
    return reader


async def publish_at_last(log: EventLog, payload: bytes) -> None:
    """Publish as soon as there is a stream that takes it."""
    async with asyncio.timeout(20):
        while True:
            try:
                await log.publish("test.a", payload)
            except BrokerUnavailable:
                await asyncio.sleep(0.01)
            else:
                return


async def publish_all(log: EventLog, payloads: Sequence[bytes], subject: str = "test.a") -> list[int]:
    return [await log.publish(subject, payload) for payload in payloads]
