"""A fleet of real processes on this machine: a router with its nats-server, and simulated workers.

async with FleetProcesses(FleetShape(workers=4)) as fleet:  fleet.data_url, fleet.control_url, await fleet.kill("w0")

Leaving the block ends all processes.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from bench.report import lag_counts
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ENV_PREFIX
from kv_runtime.nats_server import HOST, MAX_PAYLOAD_BYTES, find_binary
from kv_runtime.process import child_environment

_PORTS = range(20_000, 32_000)
"""Below the ports that the system gives to connections, so that a free port is not taken before its use."""

_draw = Random(f"{os.getpid()} {os.times().elapsed}")  # noqa: S311 - ports, not secrets
"""Shared by all calls, so that two calls do not find the same ports: these are free until they are used."""


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which no process listens."""
    held = list[socket.socket]()
    try:
        while len(held) < count:
            probe = socket.socket()
            held.append(probe)
            try:
                probe.bind(("127.0.0.1", _draw.choice(_PORTS)))
            except OSError:
                held.pop().close()
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()


READY = "Server is ready"
LED = "metadata leader"
"""What the log of each server of a cluster says once the cluster has a leader."""
_STORE_BYTES = 8 << 30


def nats_cluster(servers: int, directory: Path) -> tuple[str, dict[str, list[str]]]:
    """Prepare the servers nats-0, nats-1, ...; return their addresses, by commas, and their commands by name.

    The directory gets the configurations and the stores.
    """
    ports = free_ports(2 * servers)
    clients, routes = ports[:servers], ports[servers:]
    commands = dict[str, list[str]]()
    for number, (client, route) in enumerate(zip(clients, routes, strict=True)):
        store = directory / f"nats-{number}"
        store.mkdir()
        configuration: dict[str, Any] = {
            "server_name": store.name,
            "listen": f"{HOST}:{client}",
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {"store_dir": str(store), "max_file_store": _STORE_BYTES, "max_memory_store": 64 << 20},
        }
        if others := [f"nats://{HOST}:{port}" for port in routes if port != route]:
            configuration["cluster"] = {"name": "kv", "listen": f"{HOST}:{route}", "routes": others}
        file = store / "nats.conf"
        file.write_text(json.dumps(configuration), encoding="utf-8")
        commands[store.name] = [find_binary(), "--config", str(file)]
    return ",".join(f"nats://{HOST}:{port}" for port in clients), commands


_START_S = 60.0
_STOP_S = 20.0
_CUT_S = 3.0
_POLL_S = 0.05
_LINES = 200
_LAUNCHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        sys.exit("parent is gone")
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]}: {error.strerror}")
"""
"""Runs in the child, then becomes the command. The shorter `preexec_fn` may deadlock in a process with threads."""


class FleetShape(NamedTuple):
    """What to start: `workers` for both phases, others for `prefill` or `decode`. Settings are `section.key=value`s.

    `router_module` is what runs as the router: a test may plant a fault in it. `programs` is a folder with the commands
    `router` and `worker-agent`, which run in place of this interpreter's modules.
    A cluster of `nats_servers` keeps the log; 0: the router has a server of its own.
    The first of several `routers` has the ports. Ports of 0 are free ones, which the router keeps if it is restarted.
    `log_directory` gets a file with the output of each process.
    """

    workers: int = 4
    mode: str = "kv"
    model: str = "sim-8b"
    worker_settings: tuple[str, ...] = ()
    router_settings: tuple[str, ...] = ()
    router_module: str = "router"
    programs: Path | None = None
    prefill: int = 0
    decode: int = 0
    nats_servers: int = 0
    routers: int = 1
    port: int = 0
    control_port: int = 0
    nats_port: int = 0
    log_directory: Path | None = None

    @property
    def roles(self) -> dict[str, str]:
        """The roles of the workers by their ids: w0, ..., p0, ..., d0, ...."""
        counts = {"aggregated": ("w", self.workers), "prefill": ("p", self.prefill), "decode": ("d", self.decode)}
        return {f"{letter}{number}": role for role, (letter, count) in counts.items() for number in range(count)}


def own_environment() -> dict[str, str]:
    """Return this process's environment without the project's settings, for the project's own programs.

    Other programs get `child_environment`.
    """
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}


class ProcessFailed(Exception):
    """A process ended, or did not become ready; the message ends with what it printed."""


async def started(command: list[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a command with both of its outputs in one pipe; on Linux it gets SIGTERM when this process is killed."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which ends the child
    )


class ChildProcess:
    """One child process. Its output is read, so that it never blocks; its last lines are stored, all go to `log`."""

    def __init__(self, name: str, command: list[str], log: Path | None = None) -> None:
        self.name = name
        self.command = command
        self.was_killed = False
        """Whether it did not end within the time that `end` gives."""
        self._log = log
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def ended_with(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it runs."""
        return None if self._child is None else self._child.returncode

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.returncode is None

    @property
    def output(self) -> str:
        """The last lines it printed."""
        return "\n".join(self._lines)

    async def start(self, group: asyncio.TaskGroup, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start it; a task of `group` reads its output. `variables` are added to its environment.

        If it ran before and has ended, this starts it again, and forgets the lines that it printed before.
        """
        self._lines.clear()
        environment = own_environment() if self.command[0] == sys.executable else child_environment()
        self._child = await started(self.command, {**environment, **variables})
        self._reading = group.create_task(self._read(self._child))

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        with self._log.open("ab", buffering=0) if self._log else contextlib.nullcontext() as log:
            async for line in child.stdout:
                if log is not None:
                    log.write(line)
                self._lines.append(line.decode(errors="replace").rstrip())
        await child.wait()

    async def line_with(self, words: str) -> str:
        """Return the first line that contains `words`; raise `ProcessFailed` if none comes."""
        assert self._reading is not None
        for _ in range(round(_START_S / _POLL_S)):
            is_over = self._reading.done()
            if (line := next((line for line in self._lines if words in line), None)) is not None:
                return line
            if is_over:
                break
            await asyncio.sleep(_POLL_S)
        raise ProcessFailed(f"{self.name} never said {words!r}; it printed:\n{self.output}")

    async def until_ended(self) -> int:
        """Return its exit code, as `ended_with`, once it has ended and its output was read."""
        assert self._child is not None
        assert self._reading is not None
        await self._reading
        return await self._child.wait()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal; kill it when it takes too long or when this call is cancelled."""
        child, reading = self._child, self._reading
        if child is None or reading is None:
            return
        try:
            await _end_within(child, number, _STOP_S)
        except asyncio.CancelledError:
            await _end_within(child, number, _CUT_S)  # at a second signal a process ends at once
            raise
        finally:
            self.was_killed = child.returncode is None
            await _end_within(child, signal.SIGKILL, None)
        await reading


async def _end_within(child: asyncio.subprocess.Process, number: signal.Signals, budget_s: float | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(budget_s):
            await child.wait()


class FleetProcesses:
    """The processes, between entering and leaving the block."""

    def __init__(self, shape: FleetShape) -> None:
        self.shape = shape
        self._group = asyncio.TaskGroup()
        self._stores = TemporaryDirectory(prefix="kv-nats-") if shape.nats_servers else None
        self._cluster_url, commands = (
            nats_cluster(shape.nats_servers, Path(self._stores.name)) if self._stores else ("", {})
        )
        self.nats_servers = {name: self._process(name, command) for name, command in commands.items()}
        names = ["router", *(f"router-{number}" for number in range(2, shape.routers + 1))]
        self.routers = {name: self._process(name, self._router_command(name)) for name in names}
        self.router = self.routers["router"]
        self.workers: dict[str, ChildProcess] = {}
        self.worker_urls: dict[str, str] = {}
        self.data_url = self.control_url = self.nats_url = ""
        self.router_urls: dict[str, tuple[str, str]] = {}
        """Data and control plane of each router."""

    def _process(self, name: str, command: list[str]) -> ChildProcess:
        directory = self.shape.log_directory
        return ChildProcess(name, command, None if directory is None else directory / f"{name}.log")

    def _program(self, name: str, module: str) -> list[str]:
        programs = self.shape.programs
        return [sys.executable, "-m", module] if programs is None else [str(programs / name)]

    def _router_command(self, name: str) -> list[str]:
        shape = self.shape
        ports = free_ports(3)  # never 0, so that a router that is started again has its former addresses
        if name == "router":
            asked = (shape.port, shape.control_port, shape.nats_port)
            ports = [port or free for port, free in zip(asked, ports, strict=True)]
        command = [*self._program("router", shape.router_module), "--mode", shape.mode]
        command += ["--port", f"{ports[0]}", "--control-port", f"{ports[1]}"]
        settings = [f"nats.port={ports[2]}", *shape.router_settings]
        if self._cluster_url:
            settings[0] = f"nats.replicas={min(3, shape.nats_servers)}"
            command += ["--nats-url", self._cluster_url]
        return command + [part for setting in settings for part in ("--set", setting)]

    @property
    def all(self) -> dict[str, ChildProcess]:
        """Every process by its name."""
        return {**self.nats_servers, **self.routers, **self.workers}

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as ending:  # the last first; each runs even if one before it failed
            if self._stores:
                ending.callback(self._stores.cleanup)
            ending.push_async_callback(self._group.__aexit__, kind, error, traceback)
            for each in (self.nats_servers, self.routers, self.workers):
                ending.push_async_callback(_end_all, each.values())

    async def _start(self) -> None:
        await asyncio.gather(*(server.start(self._group) for server in self.nats_servers.values()))
        for words in (READY, LED) if len(self.nats_servers) > 1 else (READY,):
            await asyncio.gather(*(server.line_with(words) for server in self.nats_servers.values()))
        for name, router in self.routers.items():
            await router.start(self._group)
            data = (await router.line_with("router on")).split()[2]
            self.router_urls[name] = data, (await router.line_with("control plane")).split()[2]
        self.data_url, self.control_url = self.router_urls["router"]
        self.nats_url = (await self.router.line_with("event log")).split()[2]
        await asyncio.gather(*map(self.start_worker, self.shape.roles))
        await self.until_ready()

    async def start_worker(self, worker_id: str) -> str:
        """Start a worker and return its address. The router may not know it yet (`until_ready`)."""
        command = [*self._program("worker-agent", "worker_agent"), "serve", "--worker-id", worker_id]
        command += ["--nats-url", self.nats_url, "--model", self.shape.model]
        for setting in (*self.shape.worker_settings, f"worker.role={self.shape.roles[worker_id]}"):
            command += ["--set", setting]
        worker = self._process(worker_id, command)
        await self.add_worker(worker)
        url = self.worker_urls[worker_id] = (await worker.line_with(f"worker {worker_id} on")).split()[3]
        return url

    async def add_worker(self, worker: ChildProcess) -> None:
        """Start another worker, which ends with the fleet."""
        self.workers[worker.name] = worker
        await worker.start(self._group)

    async def start_again(self, name: str) -> None:
        """Start a process that ended; return once it listens. Only a worker has another address than before."""
        if name in self.workers:
            await self.start_worker(name)
        else:
            await self.all[name].start(self._group)
            await self.all[name].line_with("control plane" if name in self.routers else READY)

    async def kill(self, worker_id: str) -> None:
        """Kill the worker by SIGKILL, as a fault does."""
        await self.workers[worker_id].end(signal.SIGKILL)

    async def until_ready(self) -> None:
        """Return once every router knows each worker at its address as fit, and follows its events.

        Raises:
            ProcessFailed: that takes longer than `_START_S`.
        """
        missing = ""
        try:
            async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
                while missing := await self._missing(session):
                    await Clock().sleep(_POLL_S)
        except TimeoutError:
            ended = [each for each in self.all.values() if not each.is_running]
            one = ended[0] if ended else self.router
            raise ProcessFailed(
                f"the fleet is not ready after {_START_S} s: {missing}; {one.name} printed:\n{one.output}"
            ) from None

    async def _missing(self, session: aiohttp.ClientSession) -> str:
        """Return what the first router that is not ready says; empty if all are ready."""
        for data_url, control_url in self.router_urls.values():
            async with session.get(f"{control_url}/v1/workers") as response:
                workers = [each for each in (await response.json())["workers"] if not each["unfit"]]
            fit = {each["registration"]["worker_id"]: each["registration"]["base_url"] for each in workers}
            async with session.get(f"{data_url}/ready") as response:
                if not response.ok or len(fit) != len(self.workers) or not self.worker_urls.items() <= fit.items():
                    return f"{control_url} has {fit}, and says {await response.text()}"
        return ""

    async def lags(self) -> dict[str, Counter[float]]:
        """Return the event-loop lag so far, as `lag_counts` does, of the router and of each worker, by their URLs."""
        lags = {}
        async with aiohttp.ClientSession() as session:
            for url in (self.control_url, *self.worker_urls.values()):
                async with session.get(f"{url}/metrics") as response:
                    lags[url] = lag_counts(await response.text())
        return lags


async def _end_all(processes: Iterable[ChildProcess]) -> None:
    await asyncio.gather(*(process.end() for process in processes))
