"""An engine's publisher that plays recorded frames on real sockets, as vLLM's does, with optional faults.

    live    PUB: topic | sequence, 8 bytes big-endian | payload
    replay  ROUTER: gets [empty | first sequence wanted], answers [empty | sequence | payload] for each frame that is
            still in a ring of `buffer_steps`, then sequence 2^64 - 1 with an empty payload; other requests: nothing

The live socket is an XPUB, on the wire a PUB that also sees subscriptions: frames are not sent before there is a
subscriber. Source: `docs/SOURCES.md` E3.1, E3.5, E3.6.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import Enum

import zmq
import zmq.asyncio

from bench.capture.capture import CapturedFrame
from kv_protocol.errors import MalformedMessage
from kv_protocol.splitmix import choice_index, unit_interval
from worker_agent.events.dialects.engine_wire import REPLAY_END, decode_sequence, encode_sequence

BUFFER_STEPS = 10_000
CHAOS_RATIO = 0.2
_HWM_MESSAGES = 100_000
_POLL_MS = 100


class Fate(Enum):
    """The fault of one frame on the live socket."""

    SENT = "sent"
    DROPPED = "dropped"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"


class Chaos:
    """Draws fates: a share `CHAOS_RATIO` of frames is dropped, duplicated or reordered, each kind equally likely."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._draws = 0

    def fate(self) -> Fate:
        """Return the fault of the next frame; equal seeds give equal faults."""
        self._draws += 1
        if unit_interval(self.seed, 2 * self._draws) >= CHAOS_RATIO:
            return Fate.SENT
        return (Fate.DROPPED, Fate.DUPLICATED, Fate.REORDERED)[choice_index(self.seed, 3, 2 * self._draws + 1)]


class CapturePublisher:
    """Both sockets on ports of 127.0.0.1 that the system chose. `run` serves replays and is a part of a process."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        chaos: Chaos | None = None,
        buffer_steps: int = BUFFER_STEPS,
        live_hwm: int = _HWM_MESSAGES,
    ) -> None:
        self._live, self.endpoint = _bound(context, zmq.XPUB, live_hwm)
        self._replay, self.replay_endpoint = _bound(context, zmq.ROUTER, _HWM_MESSAGES)
        self._chaos = chaos
        self._ring: deque[CapturedFrame] = deque(maxlen=buffer_steps)
        self._held_back: list[CapturedFrame] = []
        self.fates = dict.fromkeys(Fate, 0)
        self.replays_total = 0

    async def subscribed(self) -> None:
        """Return once there is a subscription to the live socket."""
        while not (await self._live.recv()).startswith(b"\x01"):
            pass

    async def publish(self, frames: Iterable[CapturedFrame]) -> None:
        """Put the frames into the ring, and send them with the faults of chaos."""
        for frame in frames:
            self._ring.append(frame)
            fate = self._chaos.fate() if self._chaos else Fate.SENT
            self.fates[fate] += 1
            if fate is Fate.REORDERED:
                self._held_back.append(frame)
            elif fate is not Fate.DROPPED:
                overtaken, self._held_back = self._held_back, []
                for each in (frame, *([frame] if fate is Fate.DUPLICATED else []), *overtaken):
                    await self._live.send_multipart([each.topic, encode_sequence(each.sequence), each.payload])

    async def run(self, stop: asyncio.Event) -> None:
        """Answer replay requests until `stop` is set."""
        while not stop.is_set():
            if await self._replay.poll(timeout=_POLL_MS):
                await self._answer(await self._replay.recv_multipart())

    async def _answer(self, frames: list[bytes]) -> None:
        try:
            identity, _, start = frames
            wanted = decode_sequence(start)
        except (ValueError, MalformedMessage):
            return
        self.replays_total += 1
        for frame in [frame for frame in self._ring if frame.sequence >= wanted]:
            await self._replay.send_multipart([identity, b"", encode_sequence(frame.sequence), frame.payload])
        await self._replay.send_multipart([identity, b"", encode_sequence(REPLAY_END), b""])


def _bound(context: zmq.asyncio.Context, kind: int, hwm: int) -> tuple[zmq.asyncio.Socket, str]:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, hwm)
    socket.bind("tcp://127.0.0.1:*")
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
