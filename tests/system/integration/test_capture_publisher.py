"""The publisher that plays captures, on real sockets: vLLM's frames, its replay, and what chaos does to live ones."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import zmq
import zmq.asyncio

from bench.capture.capture import CapturedFrame
from bench.capture.publisher import CapturePublisher, Chaos, Fate
from kv_runtime.supervise import Part, run_parts

WAIT_S = 20.0
END = (1 << 64) - 1


class Script(Chaos):
    """Fates that a test writes down; what is not written is sent."""

    def __init__(self, **fates: Fate) -> None:
        super().__init__(0)
        self._frames = iter(range(1_000_000))
        self._fates = fates

    def fate(self) -> Fate:
        return self._fates.get(f"frame_{next(self._frames)}", Fate.SENT)


def frames(numbers: Iterable[int]) -> list[CapturedFrame]:
    return [CapturedFrame(0.0, b"kv-events", number, b"payload %d" % number) for number in numbers]


@dataclass
class Subscriber:
    """Both of a reader's sockets, and the publisher that they are connected to."""

    publisher: CapturePublisher
    live: zmq.asyncio.Socket
    replay: zmq.asyncio.Socket

    async def heard(self, count: int) -> list[int]:
        """Return the sequences of the next `count` messages."""
        got: list[int] = []
        async with asyncio.timeout(WAIT_S):
            for _ in range(count):
                topic, sequence, payload = await self.live.recv_multipart()
                got.append(int.from_bytes(sequence, "big"))
                assert (topic, payload) == (b"kv-events", b"payload %d" % got[-1])
        return got

    async def replayed(self, start: int) -> list[int]:
        """Return the sequences of a whole answer."""
        await self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        got: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while True:
                empty, sequence, payload = await self.replay.recv_multipart()
                assert empty == b""
                if int.from_bytes(sequence, "big") == END:
                    assert payload == b""
                    return got
                got.append(int.from_bytes(sequence, "big"))
                assert payload == b"payload %d" % got[-1]


@asynccontextmanager
async def subscribed(chaos: Chaos | None = None, buffer_steps: int = 10_000) -> AsyncIterator[Subscriber]:
    context, stop = zmq.asyncio.Context(), asyncio.Event()
    try:
        publisher = CapturePublisher(context, chaos=chaos, buffer_steps=buffer_steps)
        live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        live.subscribe(b"kv")
        live.connect(publisher.endpoint)
        replay.set(zmq.RCVHWM, 0)
        replay.connect(publisher.replay_endpoint)
        async with asyncio.TaskGroup() as group:
            group.create_task(run_parts([Part("replay", publisher.run)], stop=stop, drain_s=5.0))
            async with asyncio.timeout(WAIT_S):
                await publisher.subscribed()
            yield Subscriber(publisher, live, replay)
            stop.set()
    finally:
        context.destroy(linger=0)


async def test_frames_are_heard_from_the_first_and_in_order() -> None:
    async with subscribed() as subscriber:
        await subscriber.publisher.publish(frames(range(7, 1007)))
        assert await subscriber.heard(1000) == list(range(7, 1007))


async def test_a_replay_brings_what_is_still_in_the_ring_and_then_the_end() -> None:
    async with subscribed(buffer_steps=3000) as subscriber:
        await subscriber.publisher.publish(frames(range(5000)))
        assert await subscriber.replayed(4999) == [4999]
        assert await subscriber.replayed(0) == list(range(2000, 5000))
        assert await subscriber.replayed(5000) == []
        assert subscriber.publisher.replays_total == 3


async def test_each_fate_is_on_the_wire_what_it_is_called_and_replay_has_all() -> None:
    fates = Script(frame_1=Fate.DROPPED, frame_3=Fate.DUPLICATED, frame_4=Fate.REORDERED, frame_6=Fate.REORDERED)
    async with subscribed(fates) as subscriber:
        await subscriber.publisher.publish(frames(range(7)))
        assert await subscriber.heard(6) == [0, 2, 3, 3, 5, 4]
        await subscriber.publisher.publish(frames([7]))
        assert await subscriber.heard(2) == [7, 6]
        assert await subscriber.replayed(0) == list(range(8))
        assert subscriber.publisher.fates == {
            Fate.SENT: 4,
            Fate.DROPPED: 1,
            Fate.DUPLICATED: 1,
            Fate.REORDERED: 2,
        }
