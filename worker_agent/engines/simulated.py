"""The simulated engine, live: the pure simulator stepped in wall time, `speed` engine seconds per wall second.

An iteration's outputs, events and statistics become visible when its time has passed. Each deadline is the one before
plus the iteration, so a late wake-up shortens the next wait; only a delay of more than an iteration is given up.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from kv_protocol.events import Tier
from worker_agent.core.engine import (
    EngineDescription,
    EngineOutput,
    EngineRequest,
    EngineStopped,
    RequestRefused,
)
from worker_agent.core.engine_events import RankEvent
from worker_agent.core.simulator.events import render as render_event
from worker_agent.core.simulator.scheduler import Simulator, Step
from worker_agent.core.simulator.statistics import IterationStats
from worker_agent.core.simulator.statistics import render as render_statistics

STATISTICS_MAX = 10_000


class Clock(Protocol):
    """Wall time, in seconds from anywhere, never backwards."""

    def now(self) -> float:
        """Return the time."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; where that is 0, after other tasks had their turn."""


class SimulatedEngine:
    """An `Engine` made of a simulator and a clock. The simulator belongs to the event loop from now on.

    The event buffer is the simulator's; of statistics the newest `statistics_max` rows are kept. A stream's queue holds
    at most its request's `max_tokens`.
    """

    def __init__(
        self, simulator: Simulator, clock: Clock, *, speed: float = 1.0, statistics_max: int = STATISTICS_MAX
    ) -> None:
        self._simulator = simulator
        self._clock = clock
        self._speed = speed
        self._streams: dict[str, asyncio.Queue[EngineOutput | None]] = {}
        self._accepting = False
        self._running = False
        self._work = asyncio.Event()
        self._ended = asyncio.Event()
        self._stop_at_s: float | None = None
        self._deadline_s = 0.0
        self._changed = threading.Condition()  # guards the simulator's visible events and `_statistics`
        self._statistics: deque[IterationStats] = deque(maxlen=statistics_max)
        self._statistics_dropped = 0

    def describe(self) -> EngineDescription:
        """Return the simulator's description."""
        return self._simulator.description

    async def start(self) -> None:
        """Accept requests; they are computed while `run` runs."""
        self._accepting = True

    async def run(self) -> None:
        """Step the simulator until `stop`, waiting without polling while there is nothing to do."""
        self._running = True
        try:
            while not self._is_over():
                if self._simulator.has_work:
                    await self._iterate()
                else:
                    self._work.clear()
                    await self._work.wait()
                    self._deadline_s = self._clock.now()
        finally:
            self._running = False
            self._end()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests and return when none runs; after `grace_s`, at the iteration's end, cut what does."""
        self._accepting = False
        self._stop_at_s = self._clock.now() + grace_s
        self._work.set()
        if self._running:
            await self._ended.wait()
        else:
            self._end()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield one token at a time; see `Engine`."""
        request_id = request.request_id
        if not self._accepting:
            raise EngineStopped(f"{request_id}: the engine takes no requests")
        if request_id in self._streams:
            raise RequestRefused("request_id", request_id, "an id that is not in use")
        self._simulator.submit(request, self._clock.now() * self._speed)
        outputs = self._streams[request_id] = asyncio.Queue()
        self._work.set()
        try:
            finished = False
            while not finished:
                output = await outputs.get()
                if output is None:
                    raise EngineStopped(f"{request_id}: the engine stopped first")
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._streams[request_id]
            self._simulator.cancel(request_id)
            self._work.set()

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all visible events since the last call; see `Engine`."""
        with self._changed:
            self._changed.wait_for(lambda: self._simulator.has_events, timeout_s)
            events = self._simulator.drain_events()
        return [render_event(event) for event in events]

    def host_events(self, timeout_s: float) -> list[RankEvent]:
        """Return all visible events since the last call of a host tier that is a source of its own.

        Like `kv_events` it blocks its calling thread, and belongs to one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._simulator.has_host_events, timeout_s)
            return self._simulator.drain_host_events()

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the rows of all iterations since the last call; see `Engine`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._statistics), timeout_s)
            statistics = list(self._statistics)
            self._statistics.clear()
        return [render_statistics(row) for row in statistics]

    def held_hashes(self, dp_rank: int = 0, tier: Tier = Tier.GPU) -> frozenset[int]:
        """Return the engine hashes of the widest window's full blocks on `tier` at the end of the current iteration."""
        return self._simulator.held_hashes(dp_rank, tier)

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self._simulator.has_work or self._clock.now() >= self._stop_at_s

    async def _iterate(self) -> None:
        now_s = self._clock.now()
        step = self._simulator.step(now_s * self._speed)
        streams = [self._streams[request_id] for request_id, _ in step.outputs]  # an id may mean another one later
        duration_s = step.duration_s / self._speed
        began_s = self._deadline_s if now_s - self._deadline_s <= duration_s else now_s
        self._deadline_s = began_s + duration_s
        await self._clock.sleep(max(0.0, self._deadline_s - self._clock.now()))
        self._publish(step)
        for stream, (_, output) in zip(streams, step.outputs, strict=True):
            stream.put_nowait(output)

    def _publish(self, step: Step) -> None:
        with self._changed:
            self._simulator.flush_events()
            for row in step.statistics:
                self._statistics_dropped += len(self._statistics) == self._statistics.maxlen
                self._statistics.append(msgspec.structs.replace(row, stats_dropped_frames=self._statistics_dropped))
            self._changed.notify_all()

    def _end(self) -> None:
        self._accepting = False
        for stream in self._streams.values():
            stream.put_nowait(None)
        self._ended.set()
