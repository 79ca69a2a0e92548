"""The processes of the event bench: a nats-server for each group, and the processes that run the roles.

async with Stage() as stage:  index = await stage.child("events.index");  await index.ask("reach", ...)

Leaving the block leaves nothing behind.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import psutil

from bench.processes import own_environment
from indexer.embedded import ensure_streams
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog, StreamSpec
from kv_runtime.nats_server import EmbeddedNats

Answer = dict[str, Any]
BARE_STREAM, BARE_SUBJECT = "BARE", "bare.stored"
"""The stream and the subject of the bare client, beside our streams."""
_BARE_BYTES = 512 << 20
_ANSWER_S = 120.0
_ANSWER_BYTES_MAX = 1 << 28


class BenchFailed(Exception):
    """A measured process ended, failed a command, or did not answer in time."""


class Child:
    """A process that runs a role."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._role, self._process, self._errors = role, process, errors
        self.spawned_ns = time.time_ns()
        self.started: Answer = {}
        """Its first line: the result of `begin`."""

    @classmethod
    async def start(cls, role: str, arguments: dict[str, Any]) -> Self:
        """Start a process and return it after its `begin`.

        Raises:
            BenchFailed: `begin` failed.
        """
        errors = TemporaryFile()  # noqa: SIM115 - closed by `close`
        spawned_ns = time.time_ns()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"bench.{role}",
            json.dumps(arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=own_environment(),
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
            BenchFailed: the command failed, took too long, or the process has ended.
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
        """Kill the process and wait for its end."""
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
        """Return the use since then."""
        return Cpu(*(now_s - then_s for now_s, then_s in zip(self, before, strict=True)))

    def over(self, amount: float) -> "Cpu":
        """Return the use divided by `amount`."""
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
        """The URL of its nats-server."""
        return self._nats.url

    async def child(self, role: str, **arguments: Any) -> Child:  # noqa: ANN401 - as the role takes it
        """Return a process that runs a role on this log until the block is left."""
        child = await Child.start(role, {"url": self.url} | arguments)
        self._cleanup.push_async_callback(child.close)
        return child

    async def cpu(self, agents: list[Child], index: Child) -> Cpu:
        """Return the CPU time of agents, nats-server and index so far."""
        of_agents = [(await agent.call("cpu"))["cpu_ns"] for agent in agents]
        of_index = (await index.call("cpu"))["cpu_ns"]
        return Cpu(sum(of_agents) / 1e9, self.nats_cpu_s(), of_index / 1e9)

    def nats_cpu_s(self) -> float:
        """Return the CPU time of the server so far; from the scheduler where it can be read, else to 10 ms."""
        try:
            threads = Path(f"/proc/{self._nats.pid}/task").iterdir()
            return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        except OSError:
            times = psutil.Process(self._nats.pid).cpu_times()
            return float(times.user + times.system)


class Busy(NamedTuple):
    """CPU seconds a second: of our processes, and of all others on the machine, with the bench itself."""

    ours: Cpu
    others: float


class Meter:
    """The CPU use from its start on: `meter = await Meter.begin(...)`, then `await meter.read()`."""

    def __init__(self, stage: Stage, agents: list[Child], index: Child) -> None:
        self._stage, self._agents, self._index = stage, agents, index
        self._before = Cpu(0.0, 0.0, 0.0)
        self._all_before_s = self._began_s = 0.0

    @classmethod
    async def begin(cls, stage: Stage, agents: list[Child], index: Child) -> Self:
        """Return a started meter."""
        meter = cls(stage, agents, index)
        meter._before = await stage.cpu(agents, index)
        meter._all_before_s, meter._began_s = _machine_cpu_s(), time.monotonic()
        return meter

    async def read(self) -> Busy:
        """Return the use since the start."""
        seconds, all_s = time.monotonic() - self._began_s, _machine_cpu_s() - self._all_before_s
        used = (await self._stage.cpu(self._agents, self._index)).since(self._before)
        return Busy(used.over(seconds), max(0.0, all_s - sum(used)) / seconds)  # the accounts differ by some ticks


def _machine_cpu_s() -> float:
    """Return the CPU seconds that this machine has used so far, on all cores."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
