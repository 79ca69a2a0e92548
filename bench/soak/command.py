"""`router bench soak`: rounds of requests, faults between them, quiet moments.

No fault of a worker hits the first `STEADY` workers, so that their resources can be compared over the full run.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import click

from bench.child import finished
from bench.processes import ChildProcess, FleetProcesses, FleetShape, ProcessFailed, own_environment
from bench.soak.clients import Clients
from bench.soak.requests import MODEL
from bench.soak.verdicts import (
    Fault,
    Healed,
    Quiet,
    ResourceSample,
    Soak,
    markdown,
    one_request_sessions,
    problems,
    schedule,
    taken,
    totals,
)
from kv_runtime.clock import Clock

STEADY = 2
NATS = "nats-0"
"""The name of the server among the processes."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        for process in self.all.values():
            self._note(process, signal.SIGTERM)

    # ------------------------------------------------------------------------------------------------------- faults

    def victim(self, answers: Counter[str]) -> str:
        """Return the worker with the most of these pending answers that is not a steady one."""
        return max(list(self.workers)[STEADY:], key=lambda worker_id: answers[worker_id])

    async def restart(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a worker or the nats-server by a signal, and start it again; the server keeps its store."""
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
            raise ProcessFailed(f"{worker_id} is {state} {_DRAIN_WAIT_S} s after its draining began")
        await self.restart(worker_id)

    async def freeze_worker(self, worker_id: str, seconds: float) -> None:
        """Freeze the worker for a while."""
        pid = self.workers[worker_id].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def resources(self, clients: int) -> tuple[ResourceSample, ResourceSample, int]:
        """Return the resources of router (without `clients` connections) and nats-server, and the size of the store."""
        assert self._stores is not None
        files = [file for file in Path(self._stores.name).rglob("*") if file.is_file()]
        nats = taken(self.nats_servers[NATS].pid)
        return taken(self.router.pid, sockets=clients), nats, sum(file.stat().st_size for file in files)

    async def _missing(self, session: aiohttp.ClientSession) -> str:
        found = await totals(session, self.control_url)
        known = {name: found[name] for name in ("log_connected", "stream_stale", "rank_fit")}
        is_known = known == {"log_connected": 1, "stream_stale": 0, "rank_fit": len(self.workers)}
        return await super()._missing(session) or ("" if is_known else str(known))

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


_QUIET_S, _POLL_S, _WATCH_S = 30.0, 0.25, 5.0


class SoakPlan(NamedTuple):
    """The sizes and limits of a soak."""

    requests: int
    programs: Path
    """The folder of the commands `router`, `worker-agent` and `indexer`."""
    workers: int = 8
    users: int = 64
    fault_every: int = 4000
    """Requests from fault to fault."""
    patience_s: float = 60.0
    """An answer that takes longer counts as hung."""
    rounds: int = 10
    seed: int = 1


class SoakRun:
    """One run; `show` gets a line for each round."""

    def __init__(self, plan: SoakPlan, show: Callable[[str], None]) -> None:
        self._plan, self._show = plan, show
        self._faults = schedule(plan.seed, plan.requests, plan.fault_every)
        self._healed: list[Healed] = []
        self._quiet: list[Quiet] = []
        self._leases_peak = 0.0
        self._clock = Clock()

    async def run(self) -> Soak:
        """Return the results. A fleet that does not recover from a fault ends the run early with a complaint."""
        plan, complaints = self._plan, list[str]()
        async with SoakFleet(plan.programs, plan.workers) as fleet:
            clients = Clients(fleet.data_url, users=plan.users, seed=plan.seed, patience_s=plan.patience_s)
            watching = asyncio.ensure_future(self._watch(fleet))
            try:
                for number in range(1, plan.rounds + 1):
                    await self._round(fleet, clients, plan.requests * number // plan.rounds)
            except* (ProcessFailed, aiohttp.ClientError, OSError) as group:
                complaints += [f"not healed: {error}" for error in group.exceptions]
                ended = [each for each in fleet.all.values() if each.ended_with is not None]
                complaints += [f"{each.name} ended with exit code {each.ended_with}: {each.output}" for each in ended]
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                await clients.close()
        complaints += fleet.complaints
        return Soak(
            clients.tally,
            self._healed,
            self._quiet,
            complaints,
            self._leases_peak,
            plan.users,
            list(fleet.workers)[:STEADY],
            time.process_time(),
        )

    async def _round(self, fleet: SoakFleet, clients: Clients, until: int) -> None:
        began_s, before = time.perf_counter(), clients.tally.requests
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.send(until - clients.begun))
            group.create_task(self._disturb(fleet, clients, until))
        await fleet.until_ready()
        rate = (clients.tally.requests - before) / (time.perf_counter() - began_s)
        quiet = await self._until_quiet(fleet, clients)
        self._quiet.append(quiet)
        lost = sum(clients.tally.lost().values())
        self._show(
            f"{until:>9,} requests, {rate:.0f}/s, {lost} lost, {len(self._healed)} faults; "
            f"router {quiet.router.rss_bytes >> 20} MiB, {quiet.router.descriptors} descriptors"
        )

    async def _disturb(self, fleet: SoakFleet, clients: Clients, until: int) -> None:
        while self._faults and self._faults[0].at_request < until:
            fault = self._faults.pop(0)
            await clients.until_begun(fault.at_request)
            process = await self._do(fault, fleet, clients)
            began_s = time.perf_counter()
            await fleet.until_ready()
            self._healed.append(Healed(fault, process, time.perf_counter() - began_s))

    async def _do(self, fault: Fault, fleet: SoakFleet, clients: Clients) -> str:
        """Return the process that the fault hit, once its cause is gone."""
        victim = NATS if fault.kind.startswith("nats") else fleet.victim(clients.answers_by_worker())
        match fault.kind:
            case "worker drained":
                await fleet.drain_worker(victim)
            case "worker frozen":
                await fleet.freeze_worker(victim, fault.frozen_s)
            case "worker stopped" | "nats-server stopped":
                await fleet.restart(victim)
            case "worker killed" | "nats-server killed":
                clients.hit(victim)
                await fleet.restart(victim, signal.SIGKILL)
        return victim

    async def _until_quiet(self, fleet: SoakFleet, clients: Clients) -> Quiet:
        """Return the figures once no request is in flight, or after 30 s in any case."""
        async with one_request_sessions() as session:
            for _ in range(round(_QUIET_S / _POLL_S)):
                metrics = await totals(session, fleet.control_url)
                waiting = [(await totals(session, url))["outbox_bytes"] for url in fleet.worker_urls.values()]
                is_quiet = metrics["http_connections"] == clients.open_connections and not metrics["inflight_requests"]
                if is_quiet and not any(waiting):
                    break
                await self._clock.sleep(_POLL_S)
            code, output = await fleet.verified()
            metrics = await totals(session, fleet.control_url)
        router, nats, store_bytes = fleet.resources(clients.open_connections)
        return Quiet(
            clients.tally.requests,
            router,
            nats,
            {worker_id: taken(worker.pid) for worker_id, worker in fleet.workers.items()},
            metrics,
            clients.open_connections,
            store_bytes,
            f"exit code {code}: {output}" if code else "",
        )

    async def _watch(self, fleet: SoakFleet) -> None:
        async with one_request_sessions() as session:
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    metrics = await totals(session, fleet.control_url)
                    self._leases_peak = max(self._leases_peak, metrics["ledger_active_requests"])
                await self._clock.sleep(_WATCH_S)


@click.command("soak", context_settings={"show_default": True})
@click.option("--requests", type=click.IntRange(100, 1 << 32), default=10_000)
@click.option("--workers", type=click.IntRange(3, 64), default=8)
@click.option("--users", type=click.IntRange(1, 4096), default=64, help="each has one request at a time")
@click.option("--fault-every", type=click.IntRange(1, 1 << 32), default=4000, help="requests from fault to fault")
@click.option("--seed", type=int, default=1, help="seed of the requests and the faults")
@click.option(
    "--programs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(sys.executable).parent,
    help="folder of the commands router, worker-agent and indexer",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="write the report there, too")
@click.pass_context
def soak(context: click.Context, /, out: Path | None, **plan: Any) -> None:  # noqa: ANN401 - as `SoakPlan` has them
    """Send many requests through real processes while faults happen, and print how they ended.

    Exit code 1 if a request was lost, a process grew, or the index differs from what workers hold.
    """
    began_s = time.perf_counter()
    found = finished(SoakRun(SoakPlan(**plan), click.echo).run())
    wrong = problems(found)
    text = markdown(found, wrong, time.perf_counter() - began_s)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    context.exit(1 if wrong else 0)
