"""The processes of the event bench: a nats-server of its own for each group, and those that play the roles.

async with Stage() as stage:  index = await stage.child("events.index");  await index.ask("reach", ...)

Leaving the block leaves nothing behind.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import psutil

from indexer.embedded import ensure_streams
from kv_runtime.config import NatsSection
from kv_runtime.event_log import EventLog, StreamSpec
from kv_runtime.nats_server import EmbeddedNats

Answer = dict[str, Any]
BARE_STREAM, BARE_SUBJECT = "BARE", "bare.stored"
"""Where the bare client publishes, beside our streams."""
_BARE_BYTES = 512 << 20
_ANSWER_S = 120.0
_ANSWER_BYTES_MAX = 1 << 28


class BenchFailed(Exception):
    """A process that is measured ended, or could not do what it was asked, or not in time."""


class Child:
    """A process that plays a role."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._role, self._process, self._errors = role, process, errors
        self.spawned_ns = time.time_ns()
        self.started: Answer = {}
        """What it said first."""

    @classmethod
    async def start(cls, role: str, arguments: dict[str, Any]) -> Self:
        """Return the process, which has begun.

        Raises:
            BenchFailed: it has not.
        """
        errors = TemporaryFile()  # noqa: SIM115 - closed by `close`
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
        spawned_ns = time.time_ns()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"bench.{role}",
            json.dumps(arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            limit=_ANSWER_BYTES_MAX,
        )
        child = cls(role, process, errors)
        child.spawned_ns = spawned_ns
        try:
            child.started = await child._answer("begin")
        except BaseException:
            await child.close()
            raise
        return child

    async def call(self, command: str, **parameters: Any) -> Answer:  # noqa: ANN401 - as the role takes it
        """Return the answer.

        Raises:
            BenchFailed: it could not, not in time, or the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command} | parameters).encode() + b"\n")
        return await self._answer(command)

    async def _answer(self, command: str) -> Answer:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchFailed(
                f"{self._role}: {command}: no answer within {_ANSWER_S:.0f} s; {self._error_output()}"
            ) from None
        if not line:
            raise BenchFailed(f"{self._role}: {command}: it ended: {self._error_output()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise BenchFailed(f"{self._role}: {command}: {answer['error']}")
        return answer

    def _error_output(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-2000:] or "no word"

    async def close(self) -> None:
        """The process is gone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._errors.close()


class Cpu(NamedTuple):
    """CPU seconds."""

    agent_s: float
    nats_s: float
    index_s: float

    def since(self, before: "Cpu") -> "Cpu":
        """Return what was used since then."""
        return Cpu(*(now_s - then_s for now_s, then_s in zip(self, before, strict=True)))

    def over(self, amount: float) -> "Cpu":
        """Return it by unit, where it was used for so many."""
        return Cpu(*(used_s / amount for used_s in self))


class Stage:
    """A nats-server with all streams and the bucket, and children, between entering and leaving the block."""

    def __init__(self) -> None:
        self._nats = EmbeddedNats(port=0)
        self._cleanup = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as cleanup:
            await cleanup.enter_async_context(self._nats)
            self.log = await EventLog.connect(self.url, name="bench")
            cleanup.push_async_callback(self.log.close)
            await ensure_streams(self.log, NatsSection())
            await self.log.ensure_stream(StreamSpec(BARE_STREAM, (BARE_SUBJECT,), 0, _BARE_BYTES))
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    @property
    def url(self) -> str:
        """Where its nats-server is."""
        return self._nats.url

    async def child(self, role: str, **arguments: Any) -> Child:  # noqa: ANN401 - as the role takes it
        """Return a process that plays a role on this log, for as long as the block lasts."""
        child = await Child.start(role, {"url": self.url} | arguments)
        self._cleanup.push_async_callback(child.close)
        return child

    async def cpu(self, agents: list[Child], index: Child) -> Cpu:
        """Return what all of them have used so far."""
        of_agents = [(await agent.call("cpu"))["cpu_ns"] for agent in agents]
        of_index = (await index.call("cpu"))["cpu_ns"]
        return Cpu(sum(of_agents) / 1e9, self.nats_cpu_s(), of_index / 1e9)

    def nats_cpu_s(self) -> float:
        """Return what the server has used so far; by the scheduler's account where it can be read, else to 10 ms."""
        try:
            threads = Path(f"/proc/{self._nats.pid}/task").iterdir()
            return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        except OSError:
            times = psutil.Process(self._nats.pid).cpu_times()
            return float(times.user + times.system)


class Busy(NamedTuple):
    """CPU seconds a second: of our processes, and of whoever else used the machine, the bench itself included."""

    ours: Cpu
    others: float


class Meter:
    """What is used from its beginning on: `meter = await Meter.begin(...)`, then `await meter.read()`."""

    def __init__(self, stage: Stage, agents: list[Child], index: Child) -> None:
        self._stage, self._agents, self._index = stage, agents, index
        self._before = Cpu(0.0, 0.0, 0.0)
        self._all_before_s = self._began_s = 0.0

    @classmethod
    async def begin(cls, stage: Stage, agents: list[Child], index: Child) -> Self:
        """Return one that has begun."""
        meter = cls(stage, agents, index)
        meter._before = await stage.cpu(agents, index)
        meter._all_before_s, meter._began_s = _machine_cpu_s(), time.monotonic()
        return meter

    async def read(self) -> Busy:
        """Return what was used since."""
        seconds, all_s = time.monotonic() - self._began_s, _machine_cpu_s() - self._all_before_s
        used = (await self._stage.cpu(self._agents, self._index)).since(self._before)
        return Busy(used.over(seconds), max(0.0, all_s - sum(used)) / seconds)  # the accounts differ by some ticks


def _machine_cpu_s() -> float:
    """Return the CPU seconds that this machine has used so far, for whatever, on all cores."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
