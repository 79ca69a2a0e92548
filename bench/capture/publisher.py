"""An engine's publisher that plays recorded frames on real sockets, as vLLM's does.

    live    PUB: topic | sequence, 8 bytes big-endian | payload
    replay  ROUTER: gets [empty | first sequence wanted], answers [empty | sequence | payload] for each frame that is
            still in a ring of `buffer_steps`, then sequence 2^64 - 1 with an empty payload; other requests: nothing

The live socket is an XPUB, on the wire a PUB that also sees subscriptions: frames are not sent before there is a
subscriber. Source: `docs/SOURCES.md` E3.1, E3.5, E3.6.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

import zmq
import zmq.asyncio

from bench.capture.capture import CapturedFrame
from kv_protocol.errors import MalformedMessage
from worker_agent.events.dialects.engine_wire import REPLAY_END, decode_sequence, encode_sequence

BUFFER_STEPS = 10_000
_HWM_MESSAGES = 100_000
_POLL_MS = 100


class CapturePublisher:
    """Both sockets on ports of 127.0.0.1 that the system chose. `run` serves replays and is a part of a process."""

    def __init__(self, context: zmq.asyncio.Context, *, buffer_steps: int = BUFFER_STEPS) -> None:
        self._live, self.endpoint = _bound(context, zmq.XPUB)
        self._replay, self.replay_endpoint = _bound(context, zmq.ROUTER)
        self._ring: deque[CapturedFrame] = deque(maxlen=buffer_steps)

    async def subscribed(self) -> None:
        """Return once there is a subscription to the live socket."""
        while not (await self._live.recv()).startswith(b"\x01"):
            pass

    async def publish(self, frames: Iterable[CapturedFrame]) -> None:
        """Put the frames into the ring, and send them."""
        for frame in frames:
            self._ring.append(frame)
            await self._live.send_multipart([frame.topic, encode_sequence(frame.sequence), frame.payload])

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
        for frame in [frame for frame in self._ring if frame.sequence >= wanted]:
            await self._replay.send_multipart([identity, b"", encode_sequence(frame.sequence), frame.payload])
        await self._replay.send_multipart([identity, b"", encode_sequence(REPLAY_END), b""])


def _bound(context: zmq.asyncio.Context, kind: int) -> tuple[zmq.asyncio.Socket, str]:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, _HWM_MESSAGES)
    socket.bind("tcp://127.0.0.1:*")
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
