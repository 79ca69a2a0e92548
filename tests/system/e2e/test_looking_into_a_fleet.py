"""`indexer verify | at | dump` on a fleet of real processes that goes on serving."""

import asyncio
import json
import os
import sys
from random import Random
from typing import Any

import pytest

from bench.processes import FleetProcesses
from tests.system.e2e.client import Client

PROMPT_TOKENS = 200


async def typed(*arguments: str) -> tuple[int | None, str, str]:
    """Return how a command of the indexer ended, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "indexer", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def verified(fleet: FleetProcesses) -> dict[str, Any]:
    code, out, err = await typed("verify", "--nats-url", fleet.nats_url, "--index-url", fleet.control_url, "--json")
    assert code in (0, 1), err
    told: dict[str, Any] = json.loads(out)
    assert told["equal"] is (code == 0), out
    return told


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_s_index_is_every_mirror_s_while_requests_are_served(
    fleet: FleetProcesses, client: Client
) -> None:
    random, stop = Random(1), asyncio.Event()

    async def ask() -> int:
        asked = 0
        while not stop.is_set():
            answered = await client.complete([random.randrange(1000) for _ in range(PROMPT_TOKENS)], max_tokens=4)
            assert answered.status == 200
            asked += 1
        return asked

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask()) for _ in range(2)]
        told = [await verified(fleet) for _ in range(2)]
        stop.set()
    assert all(each.result() > 0 for each in asking)
    assert [[(each["worker_id"], each["verdict"]) for each in looked["ranks"]] for looked in told] == [
        [("w0", "equal"), ("w1", "equal")]
    ] * 2, told
    assert all(each["blocks"]["gpu"] > 0 for each in told[1]["ranks"])


@pytest.mark.asyncio(loop_scope="module")
async def test_the_past_of_a_fleet_is_what_its_live_index_was(fleet: FleetProcesses, client: Client) -> None:
    await client.complete(list(range(PROMPT_TOKENS)))
    for worker_id in fleet.workers:
        await client.until_index_has(worker_id)
    live, past = await asyncio.gather(
        typed("dump", "--index-url", fleet.control_url),
        typed("at", "--nats-url", fleet.nats_url, "--time", "0", "--json"),
    )
    places = [line for line in map(json.loads, live[1].splitlines()) if "epoch" in line]
    then = json.loads(past[1])
    keys = ("worker_id", "dp_rank", "epoch", "seq", "blocks")
    assert [{key: rank[key] for key in keys} for rank in then["ranks"]] == [
        {key: place[key] for key in keys} for place in places
    ]
    assert [rank["notes"] for rank in then["ranks"]] == [[], []]
