"""The processes of a soak, and the faults on them.

`STEADY` workers are frozen but never ended, so that the resources of a worker can be compared over the full run.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from bench.ports import free_ports
from bench.processes import ChildProcess, own_environment
from bench.soak.figures import one_request_sessions, totals
from bench.soak.requests import MODEL
from kv_runtime.clock import SystemClock
from kv_runtime.nats_server import HOST, MAX_PAYLOAD_BYTES, find_binary

STEADY = 2
_HEAL_S, _POLL_S = 60.0, 0.25
_DRAIN_WAIT_S = 30
_QUIET = "telemetry.log_level=warning"
_ROUTER = (
    _QUIET,
    "journal.max_bytes=67108864",
    "nats.events_max_bytes=67108864",
    "nats.snapshots_bytes_max=67108864",
    "nats.snapshot_period_s=30",
    "tokens.cache_bytes_max=4194304",
)
"""Caches and logs of a size that the first tenth of a run fills, so that later growth has another cause."""
_WORKER = (
    _QUIET,
    "engine.block_size=64",
    "engine.total_kv_blocks=512",
    "engine.max_seq_len=16384",
    "events.batch_ring_bytes_max=131072",
)
_COMPLAINT = "Traceback (most recent call last)"


class NotHealed(Exception):
    """The fleet did not recover in time; the message has what was missing."""


class SoakFleet:
    """A nats-server, a router and `workers` workers, between entering and leaving the block. It owns `directory`.

    `programs` is the folder of the commands `router`, `worker-agent` and `indexer`.
    """

    def __init__(self, directory: Path, programs: Path, workers: int) -> None:
        self._directory, self._programs = directory, programs
        self._group, self._clock = asyncio.TaskGroup(), SystemClock()
        self._nats_port, self.data_port, self._control_port = free_ports(3)
        self.nats = self._nats_process()
        self.router = ChildProcess("router", self._router_command())
        self.workers = {f"w{number}": self._worker_process(f"w{number}") for number in range(workers)}
        self.worker_urls: dict[str, str] = {}
        self.complaints: list[str] = []
        """Tracebacks that processes printed, each with the process's last lines; processes that did not end."""

    @property
    def nats_url(self) -> str:
        """Return the server's address."""
        return f"nats://{HOST}:{self._nats_port}"

    @property
    def control_url(self) -> str:
        """Return the address of the router's control plane."""
        return f"http://{HOST}:{self._control_port}"

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        try:
            await self._start_nats()
            await self.router.start(self._group)
            await self.router.line_with("control plane")
            await asyncio.gather(*(self._start_worker(worker_id) for worker_id in self.workers))
            await self.until_healed()
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(self._end(worker) for worker in self.workers.values()))
        await self._end(self.router)
        await self._end(self.nats)
        await self._group.__aexit__(None, None, None)

    # ------------------------------------------------------------------------------------------------------- faults

    def victim(self, answers: Counter[str]) -> str:
        """Return the worker, none of the steady ones, that has the most of these answers on their way."""
        return max(list(self.workers)[STEADY:], key=lambda worker_id: answers[worker_id])

    async def kill_worker(self, worker_id: str) -> None:
        """Kill the worker and start it again."""
        await self._end(self.workers[worker_id], signal.SIGKILL)
        await self._start_worker(worker_id)

    async def stop_worker(self, worker_id: str) -> None:
        """Stop the worker by SIGTERM and start it again."""
        await self._end(self.workers[worker_id])
        await self._start_worker(worker_id)

    async def drain_worker(self, worker_id: str) -> None:
        """Drain the worker at the router, stop it, and start it again."""
        url = f"{self.control_url}/v1/workers/{worker_id}/drain"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json={"handover_tokens": 4096, "handover_s": 5}) as response:
                response.raise_for_status()
            async with session.get(url, params={"wait": str(_DRAIN_WAIT_S)}) as response:
                state = (await response.json())["state"]
        if state != "drained":
            raise NotHealed(f"{worker_id} is {state} {_DRAIN_WAIT_S} s after its draining began")
        await self.stop_worker(worker_id)

    async def freeze_worker(self, worker_id: str, seconds: float) -> None:
        """Freeze the worker for a while."""
        pid = self.workers[worker_id].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await self._clock.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def restart_nats(self, number: signal.Signals) -> None:
        """End the server by a signal and start it again on its store."""
        await self._end(self.nats, number)
        self.nats = self._nats_process()
        await self._start_nats()

    async def until_healed(self) -> None:
        """Return once every worker may take requests and its events are followed; raise `NotHealed`."""
        found = ""
        async with one_request_sessions() as session:
            for _ in range(round(_HEAL_S / _POLL_S)):
                found = await self._unhealed(session)
                if not found:
                    return
                await self._clock.sleep(_POLL_S)
        raise NotHealed(f"after {_HEAL_S} s: {found}")

    async def _unhealed(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"{self.control_url}/v1/workers") as response:
            workers = (await response.json())["workers"]
        registered = {each["registration"]["worker_id"]: each["registration"]["base_url"] for each in workers}
        unfit = {each["registration"]["worker_id"]: each["unfit"] for each in workers if each["unfit"]}
        if unfit or registered != self.worker_urls:
            return f"registered {registered}, unfit {unfit}, running {self.worker_urls}"
        found = await totals(session, self.control_url)
        is_ready = found["log_connected"] and not found["stream_stale"] and found["rank_fit"] == len(self.workers)
        return "" if is_ready else str({name: found[name] for name in ("log_connected", "stream_stale", "rank_fit")})

    def ended(self) -> list[str]:
        """Return a sentence for each process that has ended, while it should run."""
        return [
            f"{process.name} ended with exit code {process.ended_with}: {process.output}"
            for process in (self.nats, self.router, *self.workers.values())
            if process.ended_with is not None
        ]

    async def verified(self) -> tuple[int, str]:
        """Return the exit code of `indexer verify`, and what it printed."""
        command = [str(self._programs / "indexer"), "verify", "--nats-url", self.nats_url]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--index-url", self.control_url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=own_environment(),
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    # ---------------------------------------------------------------------------------------------------- processes

    def _nats_process(self) -> ChildProcess:
        file = self._directory / "nats.conf"
        tree = {
            "listen": f"{HOST}:{self._nats_port}",
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {"store_dir": str(self._directory / "store"), "max_file_store": 1 << 32},
        }
        file.write_text(json.dumps(tree), encoding="utf-8")
        return ChildProcess("nats-server", [find_binary(), "--config", str(file)])

    def _router_command(self) -> list[str]:
        ports = ("--port", str(self.data_port), "--control-port", str(self._control_port))
        return [str(self._programs / "router"), "--mode", "kv", *ports, "--nats-url", self.nats_url, *_set(_ROUTER)]

    def _worker_process(self, worker_id: str) -> ChildProcess:
        arguments = ("serve", "--worker-id", worker_id, "--model", MODEL, "--nats-url", self.nats_url)
        return ChildProcess(worker_id, [str(self._programs / "worker-agent"), *arguments, *_set(_WORKER)])

    async def _start_nats(self) -> None:
        await self.nats.start(self._group)
        await self.nats.line_with("Server is ready")

    async def _start_worker(self, worker_id: str) -> None:
        worker = self.workers[worker_id] = self._worker_process(worker_id)
        await worker.start(self._group)
        self.worker_urls[worker_id] = (await worker.line_with(f"worker {worker_id} on")).split()[3]

    async def _end(self, process: ChildProcess, number: signal.Signals = signal.SIGTERM) -> None:
        await process.end(number)
        if process.ended_with == -signal.SIGKILL != -number:
            self.complaints.append(f"{process.name} did not end in time after {number.name}, and was killed")
        if _COMPLAINT in process.output:
            self.complaints.append(f"{process.name}: {process.output}")


def _set(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
