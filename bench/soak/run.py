"""One soak from its first process to its last: rounds of requests, faults between them, quiet moments."""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp

from bench.soak.clients import Clients
from bench.soak.faults import Fault, schedule
from bench.soak.figures import Quiet, one_request_sessions, taken, totals
from bench.soak.fleet import NATS, STEADY, NotHealed, SoakFleet
from bench.soak.verdicts import Healed, Soak
from kv_runtime.clock import SystemClock

_QUIET_S, _POLL_S, _WATCH_S = 30.0, 0.25, 5.0


class SoakPlan(NamedTuple):
    """What a soak does."""

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
        self._clock = SystemClock()

    async def run(self) -> Soak:
        """Return the results. A fleet that does not recover from a fault ends the run early with a complaint."""
        plan, complaints = self._plan, list[str]()
        async with SoakFleet(plan.programs, plan.workers) as fleet:
            clients = Clients(
                int(fleet.data_url.rpartition(":")[2]), users=plan.users, seed=plan.seed, patience_s=plan.patience_s
            )
            watching = asyncio.ensure_future(self._watch(fleet))
            try:
                for number in range(1, plan.rounds + 1):
                    await self._round(fleet, clients, plan.requests * number // plan.rounds)
            except* (NotHealed, aiohttp.ClientError, OSError) as group:
                complaints += [f"not healed: {error}" for error in group.exceptions] + fleet.ended()
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                clients.close()
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
        await fleet.until_healed()
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
            await fleet.until_healed()
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
