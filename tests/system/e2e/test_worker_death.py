"""One of four workers is killed under load: nothing is lost, and nothing is believed of it when it is back."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import QUIET_ROUTER

CLIENTS = 16
REQUESTS_AFTER_THE_KILL = 6
VICTIM = "w2"
SETTINGS = ("engine.block_size=16", "engine.speed=4", "telemetry.log_level=error")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def four_workers() -> AsyncIterator[FleetProcesses]:
    async with FleetProcesses(FleetShape(workers=4, worker_settings=SETTINGS, router_settings=QUIET_ROUTER)) as fleet:
        yield fleet


class Seen(NamedTuple):
    """One streamed request as its client saw it; `began_s` and `ended_s` are the monotonic clock's."""

    began_s: float
    status: int
    worker: str
    errors: tuple[str, ...]
    done: bool
    ended_s: float


async def stream(session: aiohttp.ClientSession, url: str, prompt: str, streaming: Counter[str]) -> Seen:
    """Return what came; in `streaming` the stream counts for its worker from its head to its end."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 150, "stream": True}
    began_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        worker = response.headers.get("x-worker-instance-id", "")
        if response.status != 200:
            message = (await response.json())["error"]["message"]
            return Seen(began_s, response.status, worker, (message,), done=False, ended_s=time.monotonic())
        streaming[worker] += 1
        lines = [line async for line in response.content]
        streaming[worker] -= 1
    errors = tuple(line.decode() for line in lines if line.startswith(b'data: {"error"'))
    return Seen(began_s, response.status, worker, errors, done=b"data: [DONE]\n" in lines, ended_s=time.monotonic())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_workers_streams_go_on_elsewhere_and_it_returns_empty(four_workers: FleetProcesses) -> None:
    fleet, seen, streaming = four_workers, list[Seen](), Counter[str]()
    killed_at_s = float("inf")

    async def talk(session: aiohttp.ClientSession, number: int) -> None:
        after = 0
        while after < REQUESTS_AFTER_THE_KILL:
            one = await stream(session, fleet.data_url, f"person {number} says " + "words and words " * 20, streaming)
            seen.append(one)
            after += one.began_s > killed_at_s

    async with aiohttp.ClientSession() as session:
        client = Client(session, fleet.data_url, fleet.control_url)
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(talk(session, number))
            while len(seen) < 2 * CLIENTS or not await is_frozen_in_midstream(fleet, client, streaming):
                await running_requests(client)
            killed_at_s = time.monotonic()
            await fleet.kill(VICTIM)
        assert [one for one in seen if one.errors or one.status != 200 or not one.done] == []
        moved = [one for one in seen if one.worker == VICTIM and one.began_s <= killed_at_s <= one.ended_s]
        assert 1 <= len(moved) <= CLIENTS, "the victim had running requests"
        late = [one for one in seen if one.began_s > killed_at_s]
        assert len(late) == CLIENTS * REQUESTS_AFTER_THE_KILL
        assert all(one.worker != VICTIM for one in late), "not chosen again, not even within the first two seconds"
        await returns_empty(fleet, client)


async def is_frozen_in_midstream(fleet: FleetProcesses, client: Client, streaming: Counter[str]) -> bool:
    """Return whether the victim stands still and clients wait for the rest of its streams; else it goes on."""
    os.kill(fleet.workers[VICTIM].pid, signal.SIGSTOP)
    for _ in range(3):  # what it had sent before is read by the router between two of its answers
        running = await running_requests(client)
    if running.get(VICTIM) and streaming[VICTIM]:
        return True
    os.kill(fleet.workers[VICTIM].pid, signal.SIGCONT)
    return False


async def running_requests(client: Client) -> dict[str, int]:
    samples = (await client.scrape()).samples
    return {labels["worker"]: int(n) for name, labels, n in samples if name == "kvrouter_ledger_active_requests"}


async def returns_empty(fleet: FleetProcesses, client: Client) -> None:
    prompt = list(range(200))
    assert (await client.complete(prompt, x_worker_instance_id="w1")).status == 200
    await fleet.start_worker(VICTIM)
    await fleet.until_ready()
    body = {"model": MODEL, "prompt": "person 1 says " + "words and words " * 20}
    routed = (await client.post("/v1/route", body)).body
    candidates = {each["worker_id"]: each for each in routed["decision"]["candidates"]}
    assert set(candidates) == {"w0", "w1", "w2", "w3"}, routed["decision"]["excluded"]
    assert candidates[VICTIM]["overlap_blocks"] == [0, 0, 0, 0]
    assert any(each["overlap_blocks"][0] for each in candidates.values()), "the others still hold it"
    answered = await client.complete(prompt, x_worker_instance_id=VICTIM)
    assert (answered.overlap_blocks, answered.cached_tokens) == (0, 0)
    await client.until_index_has(VICTIM)
    again = await client.complete(prompt, x_worker_instance_id=VICTIM)
    assert again.overlap_blocks * 16 == again.cached_tokens == 192
