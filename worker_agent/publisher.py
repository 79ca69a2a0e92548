"""A source of events to hop A: a thread of its own polls the source and publishes; a replay server stands by.

Neither the source nor a request ever waits for it: the poll blocks this thread only, and a full socket drops, which the
reader's cursor finds and the ring of recent payloads heals.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import structlog
import zmq
import zmq.asyncio

from kv_protocol.errors import MalformedMessage
from worker_agent.core.dialects.hop_a import REPLAY_END, decode_sequence, encode_payload, encode_sequence
from worker_agent.core.engine_events import RankEvent

_HWM_MESSAGES = 100_000
_REPLAY_HWM_MESSAGES = 1000
"""Of a replay, in the server's queue; the rest waits in the ring, where it costs no second copy."""
_LINGER_MS = 1000
_SENT_AT_ONCE = 32
_READER_S = 1.0
_TOPIC = b""

_log = structlog.get_logger("publisher")


class ReplayRing:
    """The newest payloads, bounded in bytes; written by one thread, read by others."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._payloads: deque[tuple[int, bytes]] = deque()
        self._lock = threading.Lock()

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a payload; the oldest give way."""
        with self._lock:
            self._payloads.append((sequence, payload))
            self._bytes += len(payload)
            while self._bytes > self._bytes_max and len(self._payloads) > 1:
                self._bytes -= len(self._payloads.popleft()[1])

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        """Return what is still there from `sequence` on."""
        with self._lock:
            return [entry for entry in self._payloads if entry[0] >= sequence]


class EventPublisher:
    """Publishes the events of one source, ranks in one stream. `run` belongs to a thread; the rest to the event loop.

    `poll` waits at most so many seconds for events and returns all there are; whatever the source said, it makes sense
    of it or leaves it out: what it raises ends the thread.
    """

    def __init__(
        self,
        poll: Callable[[float], list[RankEvent]],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        ring_bytes_max: int,
        poll_s: float,
        wall_ns: Callable[[], int],
    ) -> None:
        self._poll = poll
        self._poll_s = poll_s
        self._wall_ns = wall_ns
        self._sequence = 0
        self._polls_begun = 0
        self._polls_done = 0
        self._loop = asyncio.get_running_loop()
        self._polled = asyncio.Event()
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, _HWM_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.ring = ReplayRing(ring_bytes_max)

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop` is set, and then what the source still had to say."""
        try:
            while not stop.is_set():
                self._turn(self._poll_s)
            self._turn(0)
        finally:
            self._socket.close(linger=_LINGER_MS)

    def _turn(self, timeout_s: float) -> None:
        self._polls_begun += 1
        for dp_rank, events in _by_rank(self._poll(timeout_s)).items():
            payload = encode_payload(self._wall_ns() / 1e9, [event for _, event in events], dp_rank)
            self.ring.add(self._sequence, payload)
            self._socket.send_multipart([_TOPIC, encode_sequence(self._sequence), payload])
            self._sequence += 1
        self._polls_done += 1
        self._loop.call_soon_threadsafe(self._polled.set)

    async def barrier(self) -> int:
        """Return the number of messages published, once all that the source had flushed before the call is in them."""
        begun = self._polls_begun
        while self._polls_done <= begun:
            self._polled.clear()
            await self._polled.wait()
        return self._sequence


def _by_rank(events: list[RankEvent]) -> dict[int, list[RankEvent]]:
    grouped: dict[int, list[RankEvent]] = {}
    for event in events:
        grouped.setdefault(event.dp_rank, []).append(event)
    return grouped


class ReplayServer:
    """Answers replay requests from the ring, one after another; a reader that reads nothing for `_READER_S` is left.

    Source of the exchange: `event_plane.md` section 3.6.
    """

    def __init__(self, ring: ReplayRing, context: zmq.asyncio.Context) -> None:
        self._ring = ring
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, _REPLAY_HWM_MESSAGES)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a full queue is waited for; without it, what has no room is lost
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.refused_total = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Answer until `stop` is set."""
        try:
            while not stop.is_set():
                if await self._socket.poll(timeout=100):
                    await self._answer(await self._socket.recv_multipart())
        finally:
            self._socket.close()

    async def _answer(self, frames: list[bytes]) -> None:
        try:
            identity, _, start = frames
            wanted = decode_sequence(start)
        except (ValueError, MalformedMessage) as error:
            self.refused_total += 1
            _log.warning("replay_request_refused", frames=len(frames), reason=str(error))
            return
        try:
            for sent, (sequence, payload) in enumerate(self._ring.since(wanted)):
                if sent % _SENT_AT_ONCE == 0:
                    await asyncio.sleep(0)  # as long as there is room, sending does not wait: others have their turn
                await self._send(identity, sequence, payload)
            await self._send(identity, REPLAY_END, b"")
        except (TimeoutError, zmq.ZMQError) as error:
            self.refused_total += 1
            _log.warning("replay_cut_short", wanted=wanted, reason=str(error) or "the reader does not read")

    async def _send(self, identity: bytes, sequence: int, payload: bytes) -> None:
        async with asyncio.timeout(_READER_S):
            await self._socket.send_multipart([identity, b"", _TOPIC, encode_sequence(sequence), payload])
