"""Measures the data plane: all systems run at once, and a round measures every cell of each system in turn.

    cells of a round    saturated (small, 40 KB), paced, streams of 8 chunks, chunks (bursts, high rate): CPU of the
                        system only, counted from before the first request to after the last answer
    once at the end     many streams at once; a client that does not read; clients that leave; idle

Back end and clients are separate processes, on another core than the system if there are two. Failed requests do
not count in a figure; they are reported as errors.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from bench.dataplane.systems import RELAY, RunningSystem, SystemAbsent, SystemPlan, SystemProcesses
from bench.report import percentile
from bench.tables import Rounds

SMALL_BYTES, LARGE_BYTES = 300, 40_000
SMALL, LARGE, PACED, STREAM, BURST, HIGH_RATE = "small", "40 KB", "paced", "stream", "burst", "high rate"
HELD, CRAWLED, LEFT, IDLE = "held", "crawled", "left", "idle"
_CONNECTIONS = 8
_STREAM_CHUNKS, _BURST_CHUNKS = 8, 200
_HIGH_RATE_STREAMS, _HIGH_RATE_PAUSE_MS = 200, 5
_HELD_PAUSE_MS, _RAMP_STREAMS_S = 2000, 2000.0
_LEFT_PAUSE_MS = 1000
_SAMPLE_S = 0.2
_SHORT_LINES = 3
_MIB = 1 << 20

Found = dict[str, float]


class MeasuredShape(NamedTuple):
    """How much is measured. `cores`: the core of the system, and the core of all other processes; -1: any."""

    rounds: int
    seconds: float
    rate: float
    streams: int
    crawl_s: float
    cores: tuple[int, int]
    held_chunks: int = 8
    left_times: int = 20


class DataplaneResults(Rounds):
    """All rounds of every cell, by system."""

    def __init__(self) -> None:
        super().__init__()
        self.systems: list[SystemPlan] = []
        self.absent: list[str] = []

    def errors(self, system: str) -> int:
        """Return how many requests failed in all rounds, without the cells that are measured once at the end."""
        cells = (SMALL, LARGE, PACED, STREAM, BURST, HIGH_RATE)
        return int(sum(sum(self.of(system, cell, "errors")) for cell in cells))


class Bench(SystemProcesses):
    """The processes; `run` measures."""

    def __init__(self, shape: MeasuredShape) -> None:
        super().__init__(shape.cores)
        self._shape = shape
        self._running: list[RunningSystem] = []
        self.results = DataplaneResults()

    async def begin(self, plans: Sequence[SystemPlan]) -> None:
        """Start every system; `results.absent` lists those that cannot be started."""
        for plan in plans:
            try:
                self._running.append(await self.start(plan))
            except SystemAbsent as error:
                self.results.absent.append(f"absent: {_in_short(str(error))}")
            else:
                self.results.systems.append(plan)

    @property
    def steps(self) -> int:
        """How many steps `run` takes."""
        return len(self._running) * self._shape.rounds + len(self._measured_once)

    @property
    def _measured_once(self) -> list[RunningSystem]:
        return [each for each in self._running if not each.plan.text and each.plan.kind != RELAY]

    async def run(self, on_progress: Callable[[str], None]) -> DataplaneResults:
        """Measure all systems; `on_progress` gets the name of a system after each of its rounds."""
        for running in self._running:
            await self._saturated(running, SMALL_BYTES, self._shape.seconds / 4)  # warm
        for _ in range(self._shape.rounds):
            for running in self._running:
                await self._round(running)
                on_progress(running.plan.name)
        for running in self._measured_once:
            await self._once(running)
            on_progress(running.plan.name)
        return self.results

    async def _round(self, running: RunningSystem) -> None:
        seconds = self._shape.seconds
        burst = {"chunks": _BURST_CHUNKS, "pause_ms": 0}
        many = {"chunks": int(1000 * seconds / _HIGH_RATE_PAUSE_MS), "pause_ms": _HIGH_RATE_PAUSE_MS}
        found = {
            SMALL: await self._saturated(running, SMALL_BYTES, seconds),
            LARGE: await self._saturated(running, LARGE_BYTES, seconds),
        }
        if not running.plan.text:
            found |= {
                PACED: await self._paced(running),
                STREAM: await self._saturated(running, SMALL_BYTES, seconds, chunks=_STREAM_CHUNKS, pause_ms=0),
                BURST: await self._saturated(running, SMALL_BYTES, seconds, per="events", **burst),
                HIGH_RATE: await self._saturated(
                    running, SMALL_BYTES, seconds / 4, connections=_HIGH_RATE_STREAMS, per="events", **many
                ),
            }
        for cell, figures in found.items():
            self.results.add(running.plan.name, cell, figures)

    async def _once(self, running: RunningSystem) -> None:
        cells = {HELD: self._held, CRAWLED: self._crawled, LEFT: self._left, IDLE: self._idle}
        for cell, measure in cells.items():
            self.results.add(running.plan.name, cell, await measure(running))

    async def _saturated(
        self,
        running: RunningSystem,
        body_bytes: int,
        seconds: float,
        *,
        connections: int = _CONNECTIONS,
        per: Literal["requests", "events"] = "requests",
        **stream: int,
    ) -> Found:
        parameters = {"body_bytes": body_bytes, "connections": connections, "seconds": seconds, **stream}
        answer, figures = await self._metered(running, "saturate", **parameters)
        done = answer[per]
        return figures | _over(figures, done) | {"rate": done / answer["seconds"], "errors": answer["errors"]}

    async def _paced(self, running: RunningSystem) -> Found:
        shape = self._shape
        parameters = {"body_bytes": SMALL_BYTES, "rate": shape.rate, "seconds": 2 * shape.seconds}
        answer, figures = await self._metered(running, "pace", **parameters)
        latencies_us = answer["latencies_us"]
        quantiles = {f"p{int(100 * each)}_us": percentile(latencies_us, each) for each in (0.5, 0.99)}
        return figures | _over(figures, len(latencies_us)) | quantiles | {"errors": answer["errors"]}

    async def _held(self, running: RunningSystem) -> Found:
        streams = self._shape.streams
        parameters = {"streams": streams, "chunks": self._shape.held_chunks, "pause_ms": _HELD_PAUSE_MS}
        answer, figures = await self._metered(running, "hold", ramp_s=max(1.0, streams / _RAMP_STREAMS_S), **parameters)
        counts = {name: float(answer[name]) for name in ("errors", "missing", "at_once")}
        return figures | counts | {"streams": float(streams)}

    async def _crawled(self, running: RunningSystem) -> Found:
        _, figures = await self._metered(running, "crawl", seconds=self._shape.crawl_s)
        return figures

    async def _left(self, running: RunningSystem) -> Found:
        await self._backend.call("lost")
        parameters = {"times": self._shape.left_times, "pause_ms": _LEFT_PAUSE_MS}
        answer, figures = await self._metered(running, "leave", **parameters)
        lost_ns = dict((await self._backend.call("lost"))["lost"])
        delays_ms = [(lost_ns[pause] - left_ns) / 1e6 for pause, left_ns in answer["left"] if pause in lost_ns]
        unseen = float(self._shape.left_times - len(delays_ms))
        return figures | {
            "p50_ms": percentile(delays_ms, 0.5),
            "worst_ms": max(delays_ms, default=0.0),
            "unseen": unseen,
        }

    async def _idle(self, running: RunningSystem) -> Found:
        seconds = 10 * self._shape.seconds  # systems do some work every five seconds only
        before = running.used()
        await asyncio.sleep(seconds)
        after = running.used()
        return {"cpu_ms_a_second": 1e3 * (after.cpu_s - before.cpu_s) / seconds}

    async def _metered(self, running: RunningSystem, command: str, **parameters: Any) -> tuple[dict[str, Any], Found]:  # noqa: ANN401
        """Return the answer of the clients, and the use of the system meanwhile."""
        before = running.used()
        answering = self._group.create_task(self._load.call(command, port=running.port, **parameters))
        most_bytes = before.rss_bytes
        while not answering.done():
            await asyncio.wait([answering], timeout=_SAMPLE_S)
            most_bytes = max(most_bytes, running.used().rss_bytes)
        after = running.used()
        return answering.result(), {
            "cpu_s": after.cpu_s - before.cpu_s,
            "nats_cpu_s": after.nats_cpu_s - before.nats_cpu_s,
            "rss_mib": after.rss_bytes / _MIB,
            "rss_most_mib": most_bytes / _MIB,
            "rss_more_mib": (most_bytes - before.rss_bytes) / _MIB,
        }


def _in_short(text: str) -> str:
    """Return the first line and the last, which has the reason."""
    lines = text.strip().splitlines()
    return " ... ".join(lines if len(lines) < _SHORT_LINES else (lines[0], lines[-1].strip()))


def _over(figures: Found, done: float) -> Found:
    if not done:
        return {}
    return {"cpu_us": 1e6 * figures["cpu_s"] / done, "nats_cpu_us": 1e6 * figures["nats_cpu_s"] / done}
