"""A user's own mode that raises fails its own request, at whatever moment; the router and other requests go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.processes import FleetProcesses, FleetShape
from kv_runtime.clock import Clock
from tests.system.e2e.client import MODEL, Answered, Client, fleet_of
from tests.system.e2e.typed import figure, replayed
from tests.system.faults.own_modes import UNLUCKY

MODE = "tests.system.faults.own_modes:first"
SOON_S = 20.0
_LOOK_S = 0.05
_QUIET = "telemetry.log_level=error"


@asynccontextmanager
async def running(workers: int, *settings: str) -> AsyncIterator[tuple[FleetProcesses, Client]]:
    """A fleet of slow workers runs; when it is over the router runs still, whatever it said."""
    own = (f'policy.user_modes=["{MODE}"]', _QUIET, *settings)
    shape = FleetShape(workers=workers, worker_settings=("engine.speed=0.05", _QUIET), router_settings=own)
    async with fleet_of(shape) as (fleet, client):
        yield fleet, client
        assert fleet.router.is_running


async def choose_the_mode(client: Client) -> None:
    async with client.session.patch(f"{client.control_url}/v1/policy", json={"mode": MODE}) as response:
        assert response.status == 200


async def answer(client: Client, prompt: str, **changed: Any) -> Answered:
    async with asyncio.timeout(SOON_S):
        return await client.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2} | changed)


async def until(client: Client, metric: str, value: float) -> None:
    async with asyncio.timeout(SOON_S):
        while (await client.scrape()).total(metric) != value:
            await Clock().sleep(_LOOK_S)


async def test_a_request_that_waits_and_cannot_be_placed_is_told_so_and_the_others_go_on() -> None:
    async with running(1, "queue.threshold=0") as (_, client), asyncio.TaskGroup() as group:
        first = group.create_task(answer(client, "x" * 2000))
        await until(client, "ledger_active_requests", 1)
        unlucky = group.create_task(answer(client, "y", priority=UNLUCKY))
        await until(client, "queued_requests", 1)
        other = group.create_task(answer(client, "z"))
        await until(client, "queued_requests", 2)
        await choose_the_mode(client)
        assert [each.status for each in await asyncio.gather(first, unlucky, other)] == [200, 500, 200]
        await until(client, "inflight_requests", 0)
        await until(client, "ledger_active_requests", 0)


async def test_a_request_that_cannot_be_placed_a_second_time_is_told_so() -> None:
    async with running(2) as (fleet, client):
        await choose_the_mode(client)
        eldest, _ = (await client.control("/v1/workers"))["workers"]  # the mode takes it, and either may join first
        await fleet.kill(eldest["registration"]["worker_id"])
        answered = await answer(client, "x")
        assert (answered.status, answered.body["error"]["type"]) == (500, "server_error")
        await until(client, "inflight_requests", 0)


async def test_decisions_of_a_mode_that_replay_does_not_know_are_not_called_different() -> None:
    async with running(1) as (fleet, client):
        await choose_the_mode(client)
        assert (await answer(client, "x")).status == 200
        await until(client, "journal_unpublished_records", 0)
        report = await replayed(fleet.nats_url)
        assert (figure("different", report), figure("not exact", report)) == (0, 1), report
