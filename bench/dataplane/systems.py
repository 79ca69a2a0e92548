"""The systems of the data plane bench: each is started as its users start it, and its use is measured.

    ours    `python -m router`, in mode round-robin and in mode kv; metrics, ledger and journal on, with a nats-server;
            with `--tracing` also with tracing on, sampling no request or all; the back end drops the spans unread
    relay   passes on bytes and reads no HTTP (`relay.c`): the least that a router costs on this machine
    peers   each executable that is named or on PATH, in each of its policies
    dynamo  NVIDIA Dynamo's frontend in mode kv, before two of its own simulated workers (`dynamo.mocker`), as it cannot
            use ours. It tokenizes prompts, so it and ours in mode kv run with the tokenizer of one model

A system is a process and its children. The nats-server of our router, which stores the journal, is counted separately.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from bench.child import BenchFailed, Child
from bench.dataplane.backend import BLOCK_SIZE, WORKERS, BackendRole
from bench.dataplane.load import MODEL, LoadRole
from bench.processes import ChildProcess, ProcessFailed, free_ports
from bench.report import cpu_s
from bench.streaming_client import until_served

ROUND_ROBIN, CACHE, KV = "round robin", "cache-aware", "kv"
OURS, DIRECT, RELAY, DYNAMO = "router", "direct", "relay", "dynamo"
PEERS: dict[str, tuple[str, ...]] = {
    "sglang-router": ("launch",),
    "vllm-router": (),
    "smg": ("launch", "--disable-tokenizer-autoload"),
}
"""Peers by the names of their executables, and the arguments before their options."""
_PEER_POLICIES = {ROUND_ROBIN: "round_robin", CACHE: "cache_aware"}
_OUR_MODES = {ROUND_ROBIN: "round-robin", KV: "kv"}
_NATS = "nats-server"
_MOCKER = ("--num-workers", str(WORKERS), "--speedup-ratio", "1000", "--block-size", str(BLOCK_SIZE))
"""Dynamo's workers: as many as ours, with blocks as large; they answer at once."""
_READY_S = 60.0
_ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Are you ready?"}], "max_tokens": 1}


class SystemAbsent(Exception):
    """A system cannot be measured; the message has the reason."""


class SystemPlan(NamedTuple):
    """One system: its name, its policy, and its executable (empty: our own interpreter, which runs `command`).

    `sampled`: the share of requests that ours traces; None: tracing is off.
    `text` is the directory of a model: prompts are hashed with its tokenizer; empty: ours hashes their bytes.
    """

    kind: str
    policy: str
    executable: str = ""
    command: tuple[str, ...] = ("-m", "router")
    sampled: float | None = None
    text: str = ""

    @property
    def name(self) -> str:
        """The display name."""
        if self.kind in (DIRECT, RELAY):
            return self.kind
        tracing = "" if self.sampled is None else f", {self.sampled:.0%} traced"
        tokenizer = ", tokenizer" if self.text and self.kind == OURS else ""
        return f"{self.kind}, {self.policy}{tracing}{tokenizer}"


UNSAMPLED, SAMPLED = SystemPlan(OURS, KV, sampled=0.0), SystemPlan(OURS, KV, sampled=1.0)


class Used(NamedTuple):
    """CPU seconds of a system so far, those of its nats-server, and its resident memory now."""

    cpu_s: float
    nats_cpu_s: float
    rss_bytes: int


class RunningSystem(NamedTuple):
    """A system that answers on `port`."""

    plan: SystemPlan
    port: int
    process: ChildProcess | None
    """None: clients talk to the workers directly."""

    @property
    def pid(self) -> int:
        """The id of its process; only for a system that has one."""
        assert self.process is not None
        return self.process.pid

    def used(self) -> Used:
        """Return the use so far."""
        if self.process is None:
            return Used(0.0, 0.0, 0)
        process = psutil.Process(self.pid)
        tree = [process, *process.children(recursive=True)]
        own = [each for each in tree if each.name() != _NATS]
        nats_s = sum(cpu_s(each.pid) for each in tree if each.name() == _NATS)
        return Used(sum(cpu_s(each.pid) for each in own), nats_s, sum(each.memory_info().rss for each in own))


def found(
    named: Sequence[tuple[str, str]], *, traced: bool = False, text: str = ""
) -> tuple[list[SystemPlan], list[str]]:
    """Return the systems that can be measured (named, or found on PATH), and a line for each that cannot.

    `traced` adds ours in mode kv with tracing on; `text` adds ours with this model's tokenizer, and Dynamo.
    """
    ours = (SystemPlan(OURS, mode) for mode in _OUR_MODES)
    plans = [SystemPlan(DIRECT, ""), *ours, *((UNSAMPLED, SAMPLED) if traced else ())]
    absent = []
    if compiler := shutil.which("cc"):
        plans.append(SystemPlan(RELAY, "", compiler))
    else:
        absent.append("relay: absent (no cc on PATH)")
    if text:
        plans.append(SystemPlan(OURS, KV, text=text))
    if text and DYNAMO in dict(named):
        plans.append(SystemPlan(DYNAMO, KV, dict(named)[DYNAMO], text=text))
    else:
        absent.append("dynamo: absent (it needs --text and --peer dynamo=PYTHON, a Python that has ai-dynamo)")
    for name in PEERS:
        executable = shutil.which(dict(named).get(name, name))
        if executable is None:
            absent.append(f"{name}: absent (not on PATH, and no executable that --peer names)")
        else:
            plans += [SystemPlan(name, policy, executable) for policy in _PEER_POLICIES]
    return plans, absent


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Let the processes that are started in the block run on this core only; -1: on any."""
    if core < 0:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class SystemProcesses:
    """A back end, clients, and the systems that are started, between entering and leaving the block.

    `cores`: the core of the systems, and the core of all others. `event_source` is what the workers register.
    """

    def __init__(self, cores: tuple[int, int], *, event_source: str = "none") -> None:
        self._cores, self._event_source = cores, event_source
        self._cleanup = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as cleanup:
            self._directory = Path(cleanup.enter_context(TemporaryDirectory()))
            self._group = await cleanup.enter_async_context(asyncio.TaskGroup())
            with on_core(self._cores[1]):
                self._backend = await Child.start(BackendRole, {"event_source": self._event_source})
                cleanup.push_async_callback(self._backend.close)
                self._load = await Child.start(LoadRole, {})
                cleanup.push_async_callback(self._load.close)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._cleanup.__aexit__(kind, error, traceback)

    async def start(self, plan: SystemPlan) -> RunningSystem:
        """Start a system and wait until it answers; it ends with the block.

        Raises:
            SystemAbsent: it could not be started, and was ended.
        """
        worker_ports, port, variables = self._backend.started["ports"], free_ports(1)[0], dict[str, str]()
        if plan.kind == DIRECT:
            return RunningSystem(plan, worker_ports[0], None)
        makers = {OURS: _ours, DYNAMO: _dynamo, RELAY: self._relay}
        process, workers = makers.get(plan.kind, _peer)(plan, worker_ports, port), None
        if plan.kind == DYNAMO:
            workers = _dynamo_module(plan, "mocker", ["--model-path", plan.text, "--model-name", MODEL, *_MOCKER])
            # Dynamo's programs find each other by files, and stay off the network
            variables = {"DYN_FILE_KV": str(self._directory / "discovery"), "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
        async with AsyncExitStack() as cleanup:
            try:
                if workers is not None:
                    cleanup.push_async_callback(workers.end)
                    await workers.start(self._group, variables)
                cleanup.push_async_callback(process.end)
                with on_core(self._cores[0]):
                    await process.start(self._group, variables)
                if plan.kind == OURS:
                    url = (await process.line_with("event log")).split()[2]
                    await self._backend.call("join", url=url, text=plan.text or "byte")
                url = f"http://127.0.0.1:{port}"
                await until_served(url, _ASKED, wait_s=_READY_S, is_running=lambda: process.is_running)
                _move_nats(process.pid, self._cores[1])
            except BenchFailed as error:
                raise SystemAbsent(f"{plan.name}: {error}; it printed:\n{process.output}") from error
            except (OSError, ProcessFailed) as error:
                raise SystemAbsent(f"{plan.name}: {error}") from error
            self._cleanup.push_async_exit(cleanup.pop_all())
        return RunningSystem(plan, port, process)

    def _relay(self, plan: SystemPlan, worker_ports: Sequence[int], port: int) -> ChildProcess:
        program = str(self._directory / RELAY)
        source = str(Path(__file__).with_name("relay.c"))
        command = [plan.executable, "-O2", "-o", program, source]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SystemAbsent(f"{RELAY}: {made.stderr}")
        return ChildProcess(plan.name, [program, str(port), *map(str, worker_ports)])


def _ours(plan: SystemPlan, worker_ports: Sequence[int], port: int) -> ChildProcess:
    options = ["--mode", _OUR_MODES[plan.policy], "--port", f"{port}", "--control-port", "0", "--set", "nats.port=0"]
    if plan.sampled is not None:
        collector = f"tracing.endpoint=http://127.0.0.1:{worker_ports[0]}"
        options += ["--set", collector, "--set", f"tracing.ratio={plan.sampled}"]
    if plan.text:
        options += ["--set", f"tokens.text={plan.text}", "--set", "tokens.encoder=fast"]
    return ChildProcess(plan.name, [sys.executable, *plan.command, *options])


def _peer(plan: SystemPlan, worker_ports: Sequence[int], port: int) -> ChildProcess:
    command = [plan.executable, *PEERS[plan.kind], "--host", "127.0.0.1", "--port", f"{port}"]
    command += ["--policy", _PEER_POLICIES[plan.policy], "--prometheus-port", str(free_ports(1)[0])]
    command += ["--log-level", "error", "--worker-urls", *(f"http://127.0.0.1:{each}" for each in worker_ports)]
    return ChildProcess(plan.name, command)


def _dynamo(plan: SystemPlan, _worker_ports: Sequence[int], port: int) -> ChildProcess:
    options = ["--http-host", "127.0.0.1", "--http-port", f"{port}", "--router-mode", "kv"]
    return _dynamo_module(plan, "frontend", [*options, "--tokenizer", "fastokens", "--no-tokenizer-fallback"])


def _dynamo_module(plan: SystemPlan, module: str, options: list[str]) -> ChildProcess:
    command = [plan.executable, "-m", f"dynamo.{module}", "--discovery-backend", "file", *options]
    return ChildProcess(f"{plan.name}, {module}", command)


def _move_nats(pid: int, core: int) -> None:
    """Move our nats-server off the router's core, so that it does not compete with the router."""
    if core < 0:
        return
    for child in psutil.Process(pid).children(recursive=True):
        if child.name() == _NATS:
            for thread in child.threads():
                os.sched_setaffinity(thread.id, {core})
