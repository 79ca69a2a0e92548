"""A process of the event bench: an engine-event publisher that sends prepared payloads as fast as they are read."""

import time

import zmq.asyncio

from bench.capture.capture import CapturedFrame
from bench.capture.publisher import CapturePublisher
from bench.child import Answer, Role, serve
from bench.events.load import EventLoad, engine_events, payloads
from kv_runtime.supervise import Part

_RING_STEPS = 50_000


class PlayerRole(Role):
    """Prepares loads one after another, with `events_a_payload` events in a message, and sends them."""

    def __init__(self, *, url: str, events_a_payload: int) -> None:
        del url  # this role has no log
        self._events_a_payload = events_a_payload
        self._prepared: list[bytes] = []
        self._sequence = 0
        self._context = zmq.asyncio.Context()

    async def begin(self) -> Answer:
        """Return the endpoints of publications and of replays."""
        self._publisher = CapturePublisher(self._context, buffer_steps=_RING_STEPS)
        return {"publisher": self._publisher.endpoint, "replay": self._publisher.replay_endpoint}

    def parts(self) -> list[Part]:
        """Return the server of replays."""
        return [Part("replays", self._publisher.run, 1)]

    async def subscribed(self) -> Answer:
        """Return once there is a subscriber."""
        await self._publisher.subscribed()
        return {}

    async def prepare(self, load: dict[str, int]) -> Answer:
        """Prepare the payloads of this load for the next `play`."""
        self._prepared = list(payloads(engine_events(EventLoad(**load)), self._events_a_payload))
        return {"bytes": sum(map(len, self._prepared))}

    async def play(self) -> Answer:
        """Send all; return when the first message was sent, and the sequence after the last one."""
        began_ns = time.time_ns()
        frames = [
            CapturedFrame(0.0, b"", sequence, payload)
            for sequence, payload in enumerate(self._prepared, self._sequence)
        ]
        self._sequence += len(frames)
        await self._publisher.publish(frames)
        return {"began_ns": began_ns, "sequence": self._sequence}

    async def end(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


if __name__ == "__main__":
    serve(PlayerRole)
