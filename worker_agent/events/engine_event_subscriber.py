"""Subscribes to one publisher of engine events: sockets, replay, and a cursor that finds losses.

One task reads live messages and replays, which are requested one at a time. If a replay pauses for `answer_s`, or
replays take `REPLAY_S` in all, the request is given up and its socket closed, so that no late frame of it is received.

A socket holds `_HWM_MESSAGES` messages; further ones wait at the publisher, which drops some if its queue is full; the
cursor finds the hole. ZeroMQ does not bound how many frames a message has; they end, as publishers send it as a whole.

A line that any message or connection may cause is logged once in 10 s at most (`RateLimitedLog`); metrics count all.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import NO_EVENTS
from kv_runtime.clock import Clock
from kv_runtime.supervise import Part
from kv_runtime.telemetry import RateLimitedLog
from worker_agent.events.consolidation import Origin
from worker_agent.events.dialects.batches import (
    PAYLOAD_BYTES_MAX,
    REPLAY_END,
    encode_sequence,
    split_frames,
    split_replay,
)
from worker_agent.events.mirror import ENGINE
from worker_agent.events.source_cursor import Delivery, SourceCursor

_HWM_MESSAGES = 4
"""ZeroMQ counts messages, not bytes: with `PAYLOAD_BYTES_MAX` a socket holds at most 64 MiB. More were not faster."""
_MESSAGES_AT_ONCE, _BYTES_AT_ONCE = 64, 256 << 10
_POLL_S = 0.1
_DRAIN_S = 1.0
_DISCONNECTED_S = 1.0
"""After this long without a connection to the publisher its state is in doubt."""
NO_EVENTS_S = 30.0
"""After this long without a connection the publisher is missing; if there never was one, after `_DISCONNECTED_S`."""
_LINE_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Deliver = Callable[[Origin, Delivery], Awaitable[None]]
OnFrames = Callable[[list[bytes], Deliver], Awaitable[None]]

_log = structlog.get_logger("hop_a")


class PublisherAddress(NamedTuple):
    """The addresses of a publisher; without a replay endpoint every hole is a loss."""

    origin: Origin
    endpoint: str
    replay_endpoint: str = ""


class EngineEventSubscriber:
    """Reads one publisher, from the beginning of its stream; a replay may pause for `answer_s`."""

    answer_s = 2.0

    def __init__(self, publisher: PublisherAddress, context: zmq.asyncio.Context, clock: Clock) -> None:
        self.origin, self._publish_endpoint, self._replay_endpoint = publisher
        self.cursor = SourceCursor(has_replay=bool(self._replay_endpoint))
        """The position in the publisher's stream; it counts gaps, replays and losses."""
        self._context, self._clock = context, clock
        self._disconnected_since_s: float | None = clock.now()
        self._was_connected = False
        self._log = RateLimitedLog(_log, clock)
        self._replay: zmq.asyncio.Socket | None = None
        self._answered_at_s: float | None = None  # when the present replay was requested, or its newest frame applied
        self._moved = asyncio.Condition()
        self.refused_messages_total = 0

    def stale(self) -> str:
        """Return why messages may be missing, or are not applied yet; empty if no reason is known."""
        if self.cursor.is_unanswered:
            return f"{self.origin}: replay_endpoint {self._replay_endpoint} does not answer in time"
        if self._disconnected_since_s is not None:
            for_s = self._clock.now() - self._disconnected_since_s
            is_missing = for_s >= (NO_EVENTS_S if self._was_connected else _DISCONNECTED_S)
            if is_missing and self.origin.source == ENGINE:
                return f"{NO_EVENTS}: {self.origin}: publisher {self._publish_endpoint} cannot be reached"
            if for_s >= _DISCONNECTED_S:
                return f"{self.origin}: publisher {self._publish_endpoint} is not connected"
        is_read = self.cursor.is_settled and not self._moved.locked()
        return "" if is_read else f"{self.origin}: messages are missing, until a replay brings them"

    def part(self, deliver: Deliver, stage: int, *, prefix: str = "") -> Part:
        """Return the part of a process that reads, and hands what it has read to `deliver`."""
        return Part(f"{prefix}hop-a-{self.origin}", partial(self._run, deliver), stage)

    async def until_read(self, sequence: int) -> None:
        """Return once everything before `sequence` is delivered or given up."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.cursor.expected >= sequence)

    async def _run(self, deliver: Deliver, stop: asyncio.Event) -> None:
        """Read until `stop` is set, then for at most `_DRAIN_S` what is still in flight or missing."""
        self._live = _socket(self._context, zmq.SUB)
        self._live.subscribe(b"")  # all topics: a publisher has its address to itself
        self._line = self._live.get_monitor_socket(_LINE_EVENTS)
        self._live.connect(self._publish_endpoint)
        self._ready = zmq.asyncio.Poller()
        self._ready.register(self._line, zmq.POLLIN)
        self._ready.register(self._live, zmq.POLLIN)
        try:
            while not stop.is_set():
                await self._read(deliver)
            end_s = self._clock.now() + _DRAIN_S
            while (await self._read(deliver) or not self.cursor.is_settled) and self._clock.now() < end_s:
                pass
        finally:
            self._end_replay(is_answered=False)
            self._live.disable_monitor()
            self._live.close()

    async def _read(self, deliver: Deliver) -> bool:
        """Read some of what has come, or comes within `_POLL_S`; return whether there was anything."""
        ready = dict(await self._ready.poll(_POLL_S * 1000))
        if self._line in ready:
            await self._on_line_event(deliver)
        if self._live in ready:
            await self._take(self._live, self._on_live, deliver)
        if self._replay is not None and self._replay in ready:
            await self._take(self._replay, self._on_replayed, deliver)
        await self._request_replay(deliver)
        await self._clock.sleep(0)  # reading what has come does not let other tasks run
        return bool(ready)

    async def _on_line_event(self, deliver: Deliver) -> None:
        event = parse_monitor_message(await self._line.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._disconnected_since_s, self._was_connected = None, True
            await self._deliver(self.cursor.on_connect(), deliver)
            return
        self._log.info("publisher_disconnected", publisher=str(self.origin))
        if self._disconnected_since_s is None:
            self._disconnected_since_s = self._clock.now()
        self.cursor.on_disconnect()

    async def _take(self, socket: zmq.asyncio.Socket, on_frames: OnFrames, deliver: Deliver) -> None:
        """Read up to `_MESSAGES_AT_ONCE` queued messages: awaiting each would cost more than reading a small one."""
        queued: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        left_bytes = _BYTES_AT_ONCE
        with suppress(zmq.Again):
            for _ in range(_MESSAGES_AT_ONCE):
                frames = queued.recv_multipart(zmq.NOBLOCK)
                left_bytes -= len(frames[-1])
                try:
                    await on_frames(frames, deliver)
                except MalformedMessage as error:
                    self._refuse(error)
                if left_bytes < 0:
                    return
                if int(self._line.get(zmq.EVENTS)) & zmq.POLLIN:
                    return  # the next message may come from a restarted publisher

    async def _on_live(self, frames: list[bytes], deliver: Deliver) -> None:
        sequence, payload = split_frames(frames)
        await self._deliver(self.cursor.on_live(sequence, payload, self._clock.now()), deliver)

    async def _on_replayed(self, frames: list[bytes], deliver: Deliver) -> None:
        self._answered_at_s = self._clock.now()
        sequence, payload = split_replay(frames)
        if sequence == REPLAY_END:
            self._end_replay(is_answered=True)
            await self._deliver(self.cursor.on_replay_end(self._clock.now()), deliver)
        else:
            await self._deliver(self.cursor.on_replayed(sequence, payload), deliver)
            self._answered_at_s = self._clock.now()  # a delivery may take longer than an answer

    async def _request_replay(self, deliver: Deliver) -> None:
        """Request a replay if one is due and none is awaited; give up an awaited one that pauses or takes too long."""
        now_s = self._clock.now()
        if self._answered_at_s is not None:
            if now_s - self._answered_at_s >= self.answer_s or self.cursor.is_overdue(now_s):
                self._end_replay(is_answered=False)
                await self._deliver(self.cursor.on_no_answer(now_s), deliver)
        elif (start := self.cursor.next_replay(now_s)) is not None:
            if self._replay is None:
                self._replay = _socket(self._context, zmq.DEALER)
                self._replay.connect(self._replay_endpoint)
                self._ready.register(self._replay, zmq.POLLIN)
            await self._replay.send_multipart([b"", encode_sequence(start)])
            self._answered_at_s = now_s

    def _end_replay(self, *, is_answered: bool) -> None:
        self._answered_at_s = None
        if self._replay is not None and not is_answered:
            self._ready.unregister(self._replay)
            self._replay.close()
            self._replay = None

    async def _deliver(self, delivery: Delivery, deliver: Deliver) -> None:
        if delivery.lost:
            what = "publisher_began_anew" if delivery.began_anew else "engine_events_lost"
            self._log.error(what, publisher=str(self.origin), next_sequence=self.cursor.expected)
        if delivery != Delivery():
            async with self._moved:
                await deliver(self.origin, delivery)
                self._moved.notify_all()

    def _refuse(self, error: MalformedMessage) -> None:
        self.refused_messages_total += 1
        total = self.refused_messages_total
        self._log.warning("hop_a_message_refused", publisher=str(self.origin), reason=str(error), total=total)


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
    socket.set(zmq.RCVHWM, _HWM_MESSAGES)
    return socket
