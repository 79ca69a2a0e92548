"""`router what-if` and `router tune` as they are typed, on a real fleet's journal, with its router's shadows."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bench.processes import FleetProcesses
from kv_runtime.clock import Clock
from tests.support.forked import Ended
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.typed import typed

SHADOWS = {"policies": [{"name": "turns", "policy": {"mode": "round-robin"}}], "budget_us": 10_000}
_REQUESTS = 40
HIT_RATE_OFF_MAX = 0.3


_COMMANDS = {"what-if": "command import what_if", "tune": "tune import tune"}


async def run(command: str, *arguments: str) -> Ended:
    place = _COMMANDS[command]
    name = place.rpartition(" ")[2]
    return await typed("-c", f"from bench.what_if.{place}; {name}(prog_name='router {command}')", *arguments)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(fleet: FleetProcesses, client: Client) -> AsyncIterator[FleetProcesses]:
    """The fleet after conversations of two turns, seen by a shadow."""
    async with client.session.put(f"{fleet.control_url}/v1/shadows", json=SHADOWS) as answered:
        assert answered.status == 200
    for number in range(_REQUESTS):
        prompt = [number // 2 * 7 + 1] * 160 + [number % 2 + 2] * 80
        await client.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 8})
    async with asyncio.timeout(20):
        while (await client.control("/v1/shadows"))["shadows"][0]["decisions"] < _REQUESTS:
            await Clock().sleep(0.02)
    await client.until_journal_is_written()
    yield fleet


@pytest.mark.asyncio(loop_scope="module")
async def test_the_journal_of_a_real_fleet_is_played_under_other_policies(
    served: FleetProcesses, tmp_path: Any
) -> None:
    plot = tmp_path / "front.svg"
    options = ("--nats-url", served.nats_url, "--jobs", "1", "--modes", "round-robin")
    found = await run("what-if", *options, "--loads", "1,2", "--json", "--plot", str(plot))
    assert found.code == 0, found.err
    page = json.loads(found.out)
    assert (page["requests"], page["ranks"]) == (_REQUESTS, 2)
    assert page["fit"]["measurements"] > _REQUESTS
    played = [(each["name"], each["load"]) for each in page["policies"]]
    assert played == [("in force", 1.0), ("round-robin", 1.0), ("in force", 2.0), ("round-robin", 2.0)]
    hit_rates = {each["name"]: each["figures"]["hit_rate"]["value"] for each in page["policies"][:2]}
    assert hit_rates["in force"] > hit_rates["round-robin"]
    # a busy machine's timings make ranks seem unequal: up to two of three sessions were played to leave their rank
    assert abs(hit_rates["in force"] - page["recorded"]["hit_rate"]) < HIT_RATE_OFF_MAX
    assert plot.read_bytes().startswith(b"<?xml")
