"""The processes of a soak, and the faults on them.

`STEADY` workers are frozen but never ended, so that the resources of a worker can be compared over the full run.
"""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from types import TracebackType

import aiohttp

from bench.processes import ChildProcess, FleetProcesses, FleetShape, own_environment
from bench.soak.requests import MODEL
from bench.soak.verdicts import ResourceSample, one_request_sessions, taken, totals

STEADY = 2
NATS = "nats-0"
"""The name of the server among the processes."""
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


class SoakFleet(FleetProcesses):
    """A nats-server, a router and `workers` workers, between entering and leaving the block.

    `programs` is the folder of the commands `router`, `worker-agent` and `indexer`.
    """

    def __init__(self, programs: Path, workers: int) -> None:
        super().__init__(
            FleetShape(
                workers=workers,
                model=MODEL,
                worker_settings=_WORKER,
                router_settings=_ROUTER,
                nats_servers=1,
                programs=programs,
            )
        )
        self._programs = programs
        self.complaints: list[str] = []
        """Tracebacks that processes printed, each with the process's last lines; processes that did not end."""

    async def _start(self) -> None:
        await super()._start()
        await self.until_healed()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        for process in self.all.values():
            self._note(process, signal.SIGTERM)

    # ------------------------------------------------------------------------------------------------------- faults

    def victim(self, answers: Counter[str]) -> str:
        """Return the worker, none of the steady ones, that has the most of these answers on their way."""
        return max(list(self.workers)[STEADY:], key=lambda worker_id: answers[worker_id])

    async def restart(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a worker or the nats-server by a signal, and start it again; the server has its store."""
        process = self.all[name]
        await process.end(number)
        self._note(process, number)
        await self.start_again(name)

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
        await self.restart(worker_id)

    async def freeze_worker(self, worker_id: str, seconds: float) -> None:
        """Freeze the worker for a while."""
        pid = self.workers[worker_id].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await self._clock.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def resources(self, clients: int) -> tuple[ResourceSample, ResourceSample, int]:
        """Return what router (without `clients` connections) and nats-server take, and the bytes of its store."""
        assert self._stores is not None
        files = [file for file in Path(self._stores.name).rglob("*") if file.is_file()]
        nats = taken(self.nats_servers[NATS].pid)
        return taken(self.router.pid, sockets=clients), nats, sum(file.stat().st_size for file in files)

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
            for process in self.all.values()
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

    def _note(self, process: ChildProcess, number: signal.Signals) -> None:
        if process.was_killed:
            self.complaints.append(f"{process.name} did not end in time after {number.name}, and was killed")
        if _COMPLAINT in process.output:
            self.complaints.append(f"{process.name}: {process.output}")
