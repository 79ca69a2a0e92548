"""`router bench soak`: rounds of requests, faults between them, quiet moments."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import click

from bench.child import finished
from bench.soak.clients import Clients
from bench.soak.fleet import NATS, STEADY, NotHealed, SoakFleet
from bench.soak.verdicts import (
    Fault,
    Healed,
    Quiet,
    Soak,
    markdown,
    one_request_sessions,
    problems,
    schedule,
    taken,
    totals,
)
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
            clients = Clients(fleet.data_url, users=plan.users, seed=plan.seed, patience_s=plan.patience_s)
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


@click.command("soak", context_settings={"show_default": True})
@click.option("--requests", type=click.IntRange(100, 1 << 32), default=10_000)
@click.option("--workers", type=click.IntRange(3, 64), default=8)
@click.option("--users", type=click.IntRange(1, 4096), default=64, help="each has one request at a time")
@click.option("--fault-every", type=click.IntRange(1, 1 << 32), default=4000, help="requests from fault to fault")
@click.option("--seed", type=int, default=1, help="of the requests and of the faults")
@click.option(
    "--programs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(sys.executable).parent,
    help="folder of the commands router, worker-agent and indexer",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="write the report there, too")
@click.pass_context
def soak(context: click.Context, /, out: Path | None, **plan: Any) -> None:  # noqa: ANN401 - as `SoakPlan` has them
    """Send many requests through real processes while faults happen, and print what became of them.

    Exit code 1 where a request was lost, a process grew, or the index differs from what workers hold.
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
