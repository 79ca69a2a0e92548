"""A process of the event bench: what the log alone costs, with only its client around it.

The first 8 bytes of a message are the time at which it was sent. Messages go to a separate stream.
"""

import asyncio
import time
from math import ceil

from bench.child import Answer, serve
from bench.events.run import BARE_STREAM, BARE_SUBJECT, LogRole
from kv_protocol import subjects
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.supervise import Part

_STAMP_BYTES = 8
_POLL_S = 0.001


class BareRole(LogRole):
    """Sends and receives messages with the bare client."""

    def __init__(self, *, url: str) -> None:
        super().__init__(url)
        self._copied: list[bytes] = []
        self._received: list[tuple[int, int]] = []
        """When each message was sent, and when it was received, in ns."""

    async def begin(self) -> Answer:
        """Connect; the stream exists already."""
        self._log = await EventLog.connect(self._url, name="bare")
        return {}

    def parts(self) -> list[Part]:
        """Return the part of the connection."""
        return [Part("log", self._log.run, 1)]

    async def follow(self) -> Answer:
        """Read the stored messages from now on."""
        now = await self._log.stream_state(BARE_STREAM)
        await self._log.follow(BARE_STREAM, BARE_SUBJECT, self._take, after_seq=now.last_seq, created=now.created)
        return {}

    async def _take(self, message: LogMessage) -> None:
        self._received.append((int.from_bytes(message.data[:_STAMP_BYTES], "little"), time.time_ns()))

    async def lags(self, messages: int) -> Answer:
        """Wait for so many messages; return the delay of each."""
        while len(self._received) < messages:
            await self._clock.sleep(_POLL_S)
        return {"lags_s": [(now_ns - sent_ns) / 1e9 for sent_ns, now_ns in self._received]}

    async def send(self, messages: int, size: int, every_s: float) -> Answer:
        """Send so many messages, one each `every_s`, and wait for their confirmations."""
        confirmed, began_s = [], self._clock.now()
        for number in range(messages):
            await self._clock.sleep(began_s + number * every_s - self._clock.now())
            confirmed.append(await self._log.send(BARE_SUBJECT, _stamped(size)))
        await asyncio.gather(*confirmed)
        return {}

    async def copy(self, after_seq: int, last_seq: int) -> Answer:
        """Read a range of the event log, keep it for `publish`, and return how long that took."""
        copied: list[bytes] = []
        done = asyncio.Event()

        async def take(message: LogMessage) -> None:
            copied.append(message.data)
            if message.stream_seq >= last_seq:
                done.set()

        created = (await self._log.stream_state(subjects.EVENTS_STREAM)).created
        began_s = self._clock.now()
        await self._log.follow(subjects.EVENTS_STREAM, subjects.EVENTS_ALL, take, after_seq=after_seq, created=created)
        await done.wait()
        self._copied = copied
        return {"seconds": self._clock.now() - began_s, "messages": len(copied), "bytes": sum(map(len, copied))}

    async def publish(self, window: int, messages_min: int) -> Answer:
        """Publish the copied messages, at most `window` unconfirmed, and return the time.

        They are published repeatedly until `messages_min` messages were sent.
        """
        window_slots, repetitions = asyncio.Semaphore(window), ceil(messages_min / len(self._copied))
        began_s = self._clock.now()
        for _ in range(repetitions):
            for data in self._copied:
                await window_slots.acquire()
                (await self._log.send(BARE_SUBJECT, data)).add_done_callback(lambda _: window_slots.release())
        for _ in range(window):
            await window_slots.acquire()
        return {"repetitions": repetitions, "seconds": self._clock.now() - began_s}

    async def get(self, bucket: str) -> Answer:
        """Return how long it took to read the newest object of a bucket."""
        objects = self._log.objects(bucket)
        name = (await objects.names())[-1]
        began_s = self._clock.now()
        data = await objects.get(name)
        return {"seconds": self._clock.now() - began_s, "bytes": len(data)}


def _stamped(size: int) -> bytes:
    return time.time_ns().to_bytes(_STAMP_BYTES, "little") + bytes(max(0, size - _STAMP_BYTES))


if __name__ == "__main__":
    serve(BareRole)
