"""A process of the event bench: what the log alone costs, with only its client around it.

The first 8 bytes of a message are the time at which it was sent. Messages go to a separate stream, or are announced.
"""

import asyncio
import time
from math import ceil

from bench.events.child import Answer, Commands, cpu, serve
from bench.events.run import BARE_STREAM, BARE_SUBJECT
from kv_protocol import subjects
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.supervise import Part

_ANNOUNCED = "bare.announced"
_STAMP_BYTES = 8
_POLL_S = 0.001
_PAUSE_MESSAGES = 64


class BareRole:
    """Sends and receives messages with the bare client."""

    def __init__(self, *, url: str) -> None:
        self._url = url
        self._clock = SystemClock()
        self._copied: list[bytes] = []
        self._received: list[tuple[int, int]] = []
        """When each message was sent, and when it was received, in ns."""

    @property
    def commands(self) -> Commands:
        """The commands of this role, by name."""
        return {
            "follow": self._follow,
            "listen": self._listen,
            "lags": self._lags,
            "send": self._send,
            "announce": self._announce,
            "copy": self._copy,
            "publish": self._publish,
            "get": self._get,
            "cpu": cpu,
        }

    async def begin(self) -> Answer:
        """Connect; the stream exists already."""
        self._log = await EventLog.connect(self._url, name="bare")
        return {}

    def parts(self) -> list[Part]:
        """Return the part of the connection."""
        return [Part("log", self._log.run, 1)]

    async def _follow(self) -> Answer:
        """Read the stored messages from now on."""
        now = await self._log.stream_state(BARE_STREAM)
        await self._log.follow(BARE_STREAM, BARE_SUBJECT, self._take, after_seq=now.last_seq, created=now.created)
        return {}

    async def _listen(self) -> Answer:
        """Receive announcements from now on."""
        await self._log.listen(_ANNOUNCED, self._take)
        return {}

    async def _take(self, message: LogMessage) -> None:
        self._received.append((int.from_bytes(message.data[:_STAMP_BYTES], "little"), time.time_ns()))

    async def _lags(self, messages: int) -> Answer:
        """Wait for so many messages; return the delay of each and of all together, and forget them."""
        while len(self._received) < messages:
            await self._clock.sleep(_POLL_S)
        received, self._received = self._received, []
        lags_s = [(now_ns - sent_ns) / 1e9 for sent_ns, now_ns in received]
        return {"lags_s": lags_s, "took_s": (received[-1][1] - received[0][0]) / 1e9}

    async def _send(self, messages: int, size: int, every_s: float) -> Answer:
        """Send so many messages, one each `every_s`, and wait for their confirmations."""
        confirmed, began_s = [], self._clock.now()
        for number in range(messages):
            await self._clock.sleep(began_s + number * every_s - self._clock.now())
            confirmed.append(await self._log.send(BARE_SUBJECT, _stamped(size)))
        await asyncio.gather(*confirmed)
        return {}

    async def _announce(self, messages: int, size: int) -> Answer:
        """Announce so many messages as fast as possible."""
        for number in range(messages):
            await self._log.announce(_ANNOUNCED, _stamped(size))
            if number % _PAUSE_MESSAGES == 0:
                await self._clock.sleep(0)
        return {}

    async def _copy(self, after_seq: int, last_seq: int) -> Answer:
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

    async def _publish(self, window: int, messages_min: int) -> Answer:
        """Publish the copied messages, at most `window` unconfirmed, and return the time and the CPU.

        They are published repeatedly until `messages_min` messages were sent.
        """
        window_slots, repetitions = asyncio.Semaphore(window), ceil(messages_min / len(self._copied))
        began_s, began_ns = self._clock.now(), time.process_time_ns()
        for _ in range(repetitions):
            for data in self._copied:
                await window_slots.acquire()
                (await self._log.send(BARE_SUBJECT, data)).add_done_callback(lambda _: window_slots.release())
        for _ in range(window):
            await window_slots.acquire()
        seconds, cpu_ns = self._clock.now() - began_s, time.process_time_ns() - began_ns
        return {"repetitions": repetitions, "seconds": seconds, "cpu_ns": cpu_ns}

    async def _get(self, bucket: str) -> Answer:
        """Return how long it took to read the newest object of a bucket."""
        objects = self._log.objects(bucket)
        name = (await objects.names())[-1]
        began_s = self._clock.now()
        data = await objects.get(name)
        return {"seconds": self._clock.now() - began_s, "bytes": len(data)}

    async def end(self) -> None:
        """Close the connection."""
        await self._log.close()


def _stamped(size: int) -> bytes:
    return time.time_ns().to_bytes(_STAMP_BYTES, "little") + bytes(max(0, size - _STAMP_BYTES))


if __name__ == "__main__":
    serve(BareRole)
