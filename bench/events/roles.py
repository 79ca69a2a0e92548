"""Further processes of the event bench.

AgentRole       a worker's consolidator; its streams, answers and heartbeats are real. It reads a publisher, or gets
                payloads directly, without ZMQ, so that it soon holds many blocks
PlayerRole      an engine-event publisher, which sends prepared payloads as fast as they are read, or when due
BareRole        a bare client of the log: what the log alone costs. Its messages go to a stream of their own, and
                begin with 8 bytes, the time at which they were sent
SnapshotRole    an index that writes a snapshot
"""

import asyncio
import time
from collections.abc import Iterator
from itertools import islice
from math import ceil

import zmq
import zmq.asyncio

from bench.capture.payloads import encode_payload
from bench.child import Answer, Role
from bench.events.run import BARE_STREAM, BARE_SUBJECT, MODEL, EventLoad, Flush, LogRole, engine_events, schedule
from indexer.embedded import EmbeddedIndex
from kv_protocol import subjects
from kv_runtime.config.sections import IndexSection
from kv_runtime.event_log import LogMessage
from kv_runtime.supervise import Part
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator, new_epoch
from worker_agent.events.dialects.batches import encode_sequence
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress

_POLL_S = 0.001
_EVENTS_A_PAYLOAD = 8
_RING_BYTES = 16 << 20


class AgentRole(LogRole):
    """One worker. Each of its ranks keeps `_RING_BYTES` for replays."""

    def __init__(self, *, url: str, worker: str, dp_ranks: int, block_size: int, publisher: str = "") -> None:
        super().__init__(url)
        self._worker, self._dp_ranks, self._block_size = worker, dp_ranks, block_size
        self._publisher = publisher
        self._context = zmq.asyncio.Context()
        self._sequence = 0

    async def begin(self) -> Answer:
        """Connect and start the consolidator; each rank announces itself."""
        await super().begin()
        ranks = tuple(range(self._dp_ranks))
        core = Consolidation(ranks, self._block_size, "bench", new_epoch, ring_bytes_max=_RING_BYTES)
        addresses = [PublisherAddress(SOLE, self._publisher)] if self._publisher else []
        readers = [EngineEventSubscriber(address, self._context, self._clock) for address in addresses]
        self._consolidator = Consolidator(core, readers, self._log, self._clock, model=MODEL, worker_id=self._worker)
        await self._consolidator.start()
        return {}

    def parts(self) -> list[Part]:
        """Return the parts of the consolidator and of the connection."""
        return [*self._consolidator.parts(1), *super().parts()]

    async def hold(self, dp_rank: int, load: dict[str, int]) -> Answer:
        """Return once the rank holds these blocks too and their events are in the log."""
        consolidator = self._consolidator
        for flush in _at_once(EventLoad(**load)):
            self._sequence += 1
            payload = encode_payload(time.time(), flush.events, dp_rank)
            for changed in consolidator.core.on_payload(self._sequence, payload):
                consolidator.streams[changed].wake()
            await self._clock.sleep(0)
        outbox = consolidator.core.outboxes[dp_rank]
        while outbox.unacked_bytes:
            await self._clock.sleep(_POLL_S)
        return {}

    async def position(self, sequence: int) -> Answer:
        """Return the position of rank 0 once all of the publisher's messages before `sequence` were read."""
        consolidator = self._consolidator
        (reader,) = consolidator.readers
        await reader.until_read(sequence)
        epoch, last_seq = (await consolidator.position())[0]
        lost = sum(each.losses_total for each in consolidator.core.publishers.values())
        return {"epoch": epoch, "last_seq": last_seq, "losses": lost}

    async def end(self) -> None:
        """Close sockets and connection."""
        await super().end()
        self._context.destroy(linger=0)


def _at_once(load: EventLoad) -> Iterator[Flush]:
    """Yield the events of a load, `_EVENTS_A_PAYLOAD` together, all due at the start."""
    rest = engine_events(load)
    while part := list(islice(rest, _EVENTS_A_PAYLOAD)):
        yield Flush(0.0, part)


_HWM_MESSAGES = 100_000


class PlayerRole(Role):
    """Prepares loads one after another, and sends them as vLLM does.

    The socket is an XPUB, on the wire a PUB that also sees subscriptions: nothing is sent before there is a subscriber.
    Source: `docs/SOURCES.md` E3.1, E3.5.
    """

    def __init__(self, *, url: str) -> None:
        del url  # this role has no log
        self._prepared: list[tuple[Flush, bytes]] = []
        self._sequence = 0
        self._context = zmq.asyncio.Context()

    async def begin(self) -> Answer:
        """Return the endpoint of publications."""
        self._live = self._context.socket(zmq.XPUB)
        self._live.set(zmq.SNDHWM, _HWM_MESSAGES)
        self._live.bind("tcp://127.0.0.1:*")
        return {"publisher": self._live.getsockopt_string(zmq.LAST_ENDPOINT)}

    async def subscribed(self) -> Answer:
        """Return once there is a subscriber."""
        while not (await self._live.recv()).startswith(b"\x01"):
            pass
        return {}

    async def prepare(self, load: dict[str, int], blocks_s: float = 0.0) -> Answer:
        """Prepare the payloads of this load for the next `play`; 0 blocks a second: all are due at once."""
        flushes = schedule(EventLoad(**load), blocks_s) if blocks_s else _at_once(EventLoad(**load))
        self._prepared = [(flush, encode_payload(0.0, flush.events, 0)) for flush in flushes]
        return {}

    async def play(self, begins_ns: int = 0) -> Answer:
        """Send all, from `begins_ns` on (0: now); return the next message's sequence, and when each event was due."""
        began_ns, flushed_ns = begins_ns or time.time_ns(), list[int]()
        for flush, payload in self._prepared:
            due_ns = began_ns + round(flush.after_s * 1e9)
            if flush.after_s:
                await asyncio.sleep((due_ns - time.time_ns()) / 1e9)
            await self._live.send_multipart([b"", encode_sequence(self._sequence), payload])
            self._sequence += 1
            flushed_ns += [due_ns] * len(flush.events)
        return {"began_ns": began_ns, "sequence": self._sequence, "flushed_ns": flushed_ns}

    async def end(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


_STAMP_BYTES = 8


class BareRole(LogRole):
    """Sends and receives messages with the bare client."""

    def __init__(self, *, url: str) -> None:
        super().__init__(url)
        self._copied: list[bytes] = []
        self._received: list[tuple[int, int]] = []
        """When each message was sent, and when it was received, in ns."""

    async def follow(self) -> Answer:
        """Read the stored messages from now on."""
        now = await self._log.stream_state(BARE_STREAM)
        await self._log.follow(BARE_STREAM, BARE_SUBJECT, self._take, after_seq=now.last_seq, created=now.created)
        return {}

    async def _take(self, message: LogMessage) -> None:
        self._received.append((int.from_bytes(message.data[:_STAMP_BYTES], "little"), time.time_ns()))

    async def lags(self, messages: int) -> Answer:
        """Wait for this many messages; return the delay of each in seconds."""
        while len(self._received) < messages:
            await self._clock.sleep(_POLL_S)
        return {"lags_s": [(now_ns - sent_ns) / 1e9 for sent_ns, now_ns in self._received]}

    async def send(self, messages: int, size: int, every_s: float) -> Answer:
        """Send this many messages, one each `every_s`, and wait for their confirmations."""
        confirmed, began_s = [], self._clock.now()
        for number in range(messages):
            await self._clock.sleep(began_s + number * every_s - self._clock.now())
            stamp = time.time_ns().to_bytes(_STAMP_BYTES, "little")
            confirmed.append(await self._log.send(BARE_SUBJECT, stamp.ljust(size, b"\0")))
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


class SnapshotRole(LogRole):
    """An index that writes a snapshot once it has read the log; the bench has no other writer."""

    async def begin(self) -> Answer:
        """Start to read the log."""
        await super().begin()
        self._index = EmbeddedIndex(IndexSection(), self._log, self._clock)
        await self._index.start()
        return {}

    def parts(self) -> list[Part]:
        """Return the parts of the index."""
        return self._index.parts(1)

    async def written(self) -> Answer:
        """Return once a snapshot is written."""
        while not self._index.snapshot_statistics().written_total:
            await self._clock.sleep(_POLL_S)
        return {}
