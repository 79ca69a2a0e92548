"""An agent's event path with one source, polled or published, from the engine's events to its ranks' streams."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Protocol

import zmq.asyncio

from bench.capture.capture import CapturedFrame
from bench.capture.payloads import encode_payload
from bench.capture.publisher import CapturePublisher
from bench.events.source import TranslatedEvents
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, Restarts
from tests.support.parts import at_work
from tests.system.integration.broker import WAIT_S, eventually
from tests.system.integration.event_path import MODEL, WORKER
from tests.system.integration.scripted_engine import BLOCK_SIZE
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.engine_events import EngineEvent, RankEvent
from worker_agent.events.source_poller import Source

DP_RANKS = (0, 1)


class Engine(Protocol):
    """An engine with an agent that reads its events."""

    @property
    def path(self) -> Consolidator:
        """The agent's event path, which runs."""

    async def tell(self, *events: EngineEvent, dp_rank: int = 0) -> None:
        """These events happened at the rank, in one batch."""

    async def lose(self) -> None:
        """Events happened that the agent can never read."""

    async def until_read(self) -> None:
        """Return once the agent applied all that was told before."""


StartEngine = Callable[[EventLog], AbstractAsyncContextManager[Engine]]


class PolledEngine:
    """Polled in this process; a poll that fails unexpectedly loses what it took."""

    def __init__(self, log: EventLog) -> None:
        self._told: deque[list[RankEvent] | None] = deque()
        self._changed = threading.Condition()
        self.path = event_path(log, source=Source(self._take, TranslatedEvents()))

    def _take(self, timeout_s: float) -> list[RankEvent]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._told), timeout_s)
            taken = self._told.popleft() if self._told else []
        if taken is None:
            raise ZeroDivisionError("the engine's own")
        return taken

    def _tell(self, events: list[RankEvent] | None) -> None:
        with self._changed:
            self._told.append(events)
            self._changed.notify()

    async def tell(self, *events: EngineEvent, dp_rank: int = 0) -> None:
        self._tell([RankEvent(dp_rank, event) for event in events])

    async def lose(self) -> None:
        self._tell(None)

    async def until_read(self) -> None:
        await eventually(lambda: not self._told)
        async with asyncio.timeout(WAIT_S):
            await self.path.position()


class PublishingEngine:
    """Publishes over ZeroMQ, with replays; what is lost is in no replay either."""

    def __init__(self, log: EventLog, context: zmq.asyncio.Context) -> None:
        self.publisher = CapturePublisher(context)
        at = PublisherAddress(SOLE, self.publisher.endpoint, self.publisher.replay_endpoint)
        self.path = event_path(log, EngineEventSubscriber(at, context, SystemClock()))
        self._sequence = 0

    async def tell(self, *events: EngineEvent, dp_rank: int = 0) -> None:
        payload = encode_payload(1.5, events, dp_rank)
        await self.publisher.publish([CapturedFrame(0.0, b"", self._sequence, payload)])
        self._sequence += 1

    async def lose(self) -> None:
        self._sequence += 1

    async def until_read(self) -> None:
        (reader,) = self.path.readers
        async with asyncio.timeout(WAIT_S):
            await reader.until_read(self._sequence)


def event_path(log: EventLog, *readers: EngineEventSubscriber, source: Source | None = None) -> Consolidator:
    """Return the path of a worker of `DP_RANKS`; its epochs are 100, 101."""
    return Consolidator(
        Consolidation(DP_RANKS, BLOCK_SIZE, "i", count(100).__next__),
        readers,
        log,
        SystemClock(),
        model=MODEL,
        worker_id=WORKER,
        source=source,
        poll_s=0.01,
        restarts=Restarts(failures_max=100, pause_s=0.0),
    )


@asynccontextmanager
async def polled(log: EventLog) -> AsyncIterator[Engine]:
    """An engine that the agent polls."""
    engine = PolledEngine(log)
    async with _running(engine.path, []):
        yield engine


@asynccontextmanager
async def published(log: EventLog) -> AsyncIterator[Engine]:
    """An engine that publishes itself, to which the agent has subscribed."""
    context = zmq.asyncio.Context()
    try:
        engine = PublishingEngine(log, context)
        async with _running(engine.path, [Part("replays", engine.publisher.run, 5)]):
            async with asyncio.timeout(WAIT_S):
                await engine.publisher.subscribed()
            yield engine
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def _running(path: Consolidator, more: list[Part]) -> AsyncIterator[None]:
    await path.start()
    async with at_work(*path.parts(0), *more):
        yield


WAYS: dict[str, StartEngine] = {"polled": polled, "published": published}
