"""`indexer verify | at | dump` on a fleet of real processes that goes on serving."""

import asyncio
import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import aiohttp
import pytest

from bench.processes import FleetProcesses
from tests.system.e2e.client import Client
from tests.system.e2e.typed import typed

PROMPT_TOKENS = 200


async def verified(fleet: FleetProcesses) -> dict[str, Any]:
    command = ("verify", "--nats-url", fleet.nats_url, "--index-url", fleet.control_url, "--json")
    ended = await typed("-m", "indexer", *command)
    assert ended.code in (0, 1), ended.err
    found: dict[str, Any] = ended.json
    assert found["equal"] is (ended.code == 0), ended.out
    return found


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
async def test_a_fleet_is_watched_as_it_is_as_it_was_and_as_it_changes(fleet: FleetProcesses, client: Client) -> None:
    async with client.session.get(f"{client.control_url}/v1/live") as response:
        events = live_events(response)
        assert (await anext(events))[0] == "hello"
        answered = await client.complete(list(range(PROMPT_TOKENS)), max_tokens=1)
        decided = answered.headers["x-decision-id"]
        seen: dict[str, Any] = {}
        while not {"fleet", "decisions"} <= seen.keys():
            kind, data = await anext(events)
            if kind != "decisions" or any(each["decision_id"] == decided for each in data["decisions"]):
                seen[kind] = data
    now = await client.control("/v1/fleet")
    assert sorted(now["workers"]["worker_id"]) == sorted(seen["fleet"]["workers"]["worker_id"]) == sorted(fleet.workers)
    assert sum(now["ranks"]["gpu_blocks"]) > 0
    history = await client.control("/v1/history")
    then = await client.control(f"/v1/fleet?at={history['ring']['to_s']}")
    assert (then["source"], then["at_s"]) == ("ring", history["ring"]["to_s"])
    assert "router_started" in {each["kind"] for each in history["marks"]}
    log = await client.control("/v1/event-log")
    assert (log["connected"], log["ranks"]["stale"], log["journal"]["lost"]["buffer_full"]) == (True, ["", ""], 0)
    compared = (await client.control("/v1/predictions"))["ranks"]
    assert {each["worker_id"] for each in compared} <= set(fleet.workers)


async def live_events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """Yield the events of a stream."""
    fields: dict[str, str] = {}
    async for line in response.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], json.loads(fields["data"])
            fields = {}
