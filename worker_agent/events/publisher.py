"""Publishes a source's events over ZeroMQ: a thread polls the source, the event loop answers replay requests.

It never blocks the source or a request: the poll blocks only this thread, and a full socket drops messages; the
reader's cursor finds the hole, and the ring of recent payloads fills it. How urgently it polls: `poll_urgency.py`.

    the source                      the publisher
    -----------------------------   ------------------------------------------------------------------------------------
    cannot be polled                polls again until it succeeds; the source's event ids show what was lost meanwhile
      (`EngineError`)
    raises anything else, or its    does not know which events of the cycle were published. It skips sequences, which no
      events cannot be published      replay fills: the reader clears the source's blocks. Then the cycles start again,
                                      until they fail too often (`Restarts`): the process drains and ends
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog
import zmq
import zmq.asyncio

from kv_protocol.errors import MalformedMessage
from kv_runtime.supervise import RESTARTS, Restarts, SupervisedThread
from worker_agent.engines.types import EngineError
from worker_agent.events.dialects.engine_wire import (
    REPLAY_END,
    decode_sequence,
    encode_payload,
    encode_sequence,
    parts_of,
)
from worker_agent.events.engine_events import EngineEvent, RankEvent
from worker_agent.events.mirror import ENGINE
from worker_agent.events.poll_urgency import Drain
from worker_agent.events.quarantine import Quarantine
from worker_agent.events.relearning import Drained

_HWM_MESSAGES = 100_000
REPLAY_HWM_MESSAGES = 1000
"""Messages of a replay in the server's queue; the rest waits in the ring, without a second copy."""
_LINGER_MS = 1000
_SENT_AT_ONCE = 32
_READER_S = 1.0
_FAILED_S = 0.1
"""Pause after a failed poll."""
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
        """Keep a payload; drop the oldest beyond the bound."""
        with self._lock:
            self._payloads.append((sequence, payload))
            self._bytes += len(payload)
            while self._bytes > self._bytes_max and len(self._payloads) > 1:
                self._bytes -= len(self._payloads.popleft()[1])

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        """Return the kept payloads from `sequence` on."""
        with self._lock:
            return [entry for entry in self._payloads if entry[0] >= sequence]


class Source(NamedTuple):
    """One source of events, polled by one thread.

    `take` waits at most so many seconds for an event, and returns all raw events. `translate` parses them, drops
    unreadable ones, and raises nothing. `buffer_events` is how many events the source buffers until it is polled;
    0: unknown. From any thread, `stale` returns why the translated events of a rank may be wrong, and `events_lost`
    counts a rank's events that were lost before the poll. `quarantine` has the events that `translate` dropped as
    unreadable; None: it drops none.
    """

    take: Callable[[float], list[Any]]
    translate: Callable[[list[Any]], list[RankEvent]] = list
    buffer_events: int = 0
    stale: Callable[[int], str] = lambda _: ""
    events_lost: Mapping[int, int] = MappingProxyType({})
    quarantine: Quarantine | None = None


class EventPublisher:
    """Publishes one source, its ranks in one stream. `run` belongs to a thread; the rest to the event loop."""

    def __init__(
        self,
        source: Source,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        ring_bytes_max: int,
        poll_s: float,
        wall_ns: Callable[[], int],
        name: str = ENGINE,
        restarts: Restarts = RESTARTS,
    ) -> None:
        self._source = source
        self.thread = SupervisedThread(f"{name}-events", self._run_polls, restarts=restarts)
        """The thread that polls, for its failures."""
        self._poll_s = poll_s
        self._wall_ns = wall_ns
        self._sequence = 0
        self._polls_begun = self._polls_done = 0
        self._loop = asyncio.get_running_loop()
        self._polled = asyncio.Event()
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, _HWM_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.ring = ReplayRing(ring_bytes_max)
        self.drain = Drain(source.buffer_events)
        self.drained = Drained(0, {})
        """The newest time at which the source had no more events."""
        self.poll_failures_total = 0
        self.failure = ""
        """Why the source could not be polled; empty while it can."""
        self.left_out = -1
        """The last skipped sequence: the blocks of a reader that is not past it may be wrong."""

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop` is set, and then the source's remaining events.

        Raises:
            PartGaveUp: cycles failed too often.
        """
        try:
            self.thread.run(stop)
        finally:
            self._socket.close(linger=_LINGER_MS)

    def _run_polls(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self._poll_once(0 if self.drain.is_pressed else self._poll_s)
                if self.failure:
                    stop.wait(_FAILED_S)
            self._poll_once(0)
        except Exception:
            self._leave_out()
            raise

    def _leave_out(self) -> None:
        """Skip sequences after a failed cycle, whose published events are unknown; an empty message shows the hole."""
        self.drain.on_failure()
        self.drain.on_cycle(is_lossy=True)
        self.left_out = self._sequence + 1  # the one before may be in the ring already
        self._sequence += 2
        self._send([], 0)

    def _poll_once(self, timeout_s: float) -> None:
        self._polls_begun += 1
        lost_before = sum(self._source.events_lost.values())
        self._publish(self._source.translate(self._take(timeout_s)))
        is_lossy = sum(self._source.events_lost.values()) > lost_before
        if self.drain.on_cycle(is_lossy=is_lossy):
            self.drained = Drained(self._sequence, dict(self._source.events_lost))
        if not self.failure:
            self._polls_done = self._polls_begun
        self._loop.call_soon_threadsafe(self._polled.set)

    def _take(self, timeout_s: float) -> list[Any]:
        events: list[Any] = []
        try:
            polled = self._source.take(timeout_s)
            while self.drain.on_poll(len(polled)):
                events += polled
                polled = self._source.take(0)
            events += polled
            self.failure = ""
        except EngineError as error:
            self.drain.on_failure()
            self.poll_failures_total += 1
            if not self.failure:
                _log.warning("source_not_polled", reason=str(error))
            self.failure = f"cannot be polled: {error}"
        return events

    def _publish(self, events: list[RankEvent]) -> None:
        for dp_rank, of_rank in _by_rank(events).items():
            for part in parts_of(of_rank):
                self._send(part, dp_rank)

    def _send(self, events: list[EngineEvent], dp_rank: int) -> None:
        payload = encode_payload(self._wall_ns() / 1e9, events, dp_rank)
        self.ring.add(self._sequence, payload)
        self._socket.send_multipart([_TOPIC, encode_sequence(self._sequence), payload])
        self._sequence += 1

    async def barrier(self) -> int:
        """Return the number of published messages, once they include all events flushed before the call."""
        begun = self._polls_begun
        while self._polls_done <= begun:
            self._polled.clear()
            await self._polled.wait()
        return self._sequence


def _by_rank(events: list[RankEvent]) -> dict[int, list[EngineEvent]]:
    grouped: dict[int, list[EngineEvent]] = {}
    for dp_rank, event in events:
        grouped.setdefault(dp_rank, []).append(event)
    return grouped


class ReplayServer:
    """Answers replay requests from the ring, one at a time; stops a replay that is not read for `_READER_S`.

    Source of the exchange: `docs/SOURCES.md` E3.6.
    """

    def __init__(self, ring: ReplayRing, context: zmq.asyncio.Context) -> None:
        self._ring = ring
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, REPLAY_HWM_MESSAGES)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending waits for a full queue; without it, messages are lost
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
            start_sequence = decode_sequence(start)
        except (ValueError, MalformedMessage) as error:
            self.refused_total += 1
            _log.warning("replay_request_refused", frames=len(frames), reason=str(error))
            return
        try:
            for sent, (sequence, payload) in enumerate(self._ring.since(start_sequence)):
                if sent % _SENT_AT_ONCE == 0:
                    await asyncio.sleep(0)  # sending to a queue with space does not yield to other tasks
                await self._send(identity, sequence, payload)
            await self._send(identity, REPLAY_END, b"")
        except (TimeoutError, zmq.ZMQError) as error:
            self.refused_total += 1
            _log.warning("replay_cut_short", wanted=start_sequence, reason=str(error) or "the reader does not read")

    async def _send(self, identity: bytes, sequence: int, payload: bytes) -> None:
        async with asyncio.timeout(_READER_S):
            await self._socket.send_multipart([identity, b"", _TOPIC, encode_sequence(sequence), payload])
