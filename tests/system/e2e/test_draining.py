"""A worker of a real fleet is drained under load: no request fails, and with a hand-over nothing is computed twice."""

import asyncio
from typing import Any

import pytest

from bench.processes import FleetShape
from tests.system.e2e.client import Answered, Client, fleet_of
from tests.system.e2e.conftest import BLOCK_SIZE, FAST_WORKER, QUIET_ROUTER

PEOPLE = 8
TOKENS = 20 * BLOCK_SIZE
REUSABLE_TOKENS = TOKENS - BLOCK_SIZE
"""The last token is always computed, and so is its block."""


def prompt(person: int) -> list[int]:
    return [(person * TOKENS + at) % 250 for at in range(TOKENS)]


async def drained(client: Client, **wish: int) -> dict[str, Any]:
    url = f"{client.control_url}/v1/workers/w1/drain"
    async with client.session.post(url, json=wish) as response:
        assert response.status == 202, await response.text()
    told: dict[str, Any] = await client.control("/v1/workers/w1/drain?wait=30")
    assert told["state"] == "drained", told
    return told


@pytest.mark.parametrize(("tokens", "found_tokens"), [(PEOPLE * TOKENS, REUSABLE_TOKENS), (0, 0)])
async def test_what_a_drained_worker_held_is_found_elsewhere_if_it_was_handed_over(
    tokens: int, found_tokens: int
) -> None:
    settings = (*QUIET_ROUTER, "policy.history_weight=0")  # the holder of a prompt is chosen, whatever it computed last
    shape = FleetShape(workers=3, worker_settings=FAST_WORKER, router_settings=settings)
    async with fleet_of(shape) as (fleet, client):
        for person in range(PEOPLE):
            assert (await client.complete(prompt(person), x_worker_instance_id="w1")).status == 200
        await client.until_index_has("w1")
        over, answers = asyncio.Event(), list[Answered]()

        async def load() -> None:
            while not over.is_set():  # less than a block: nothing that could be handed over
                answers.append(await client.complete(list(range(240, 230, -1)), max_tokens=4))

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(load())
            told = await drained(client, handover_tokens=tokens)
            await fleet.workers["w1"].end()
            for worker_id in ("w0", "w2"):
                await client.until_index_has(worker_id)
            again = [await client.complete(prompt(person)) for person in range(PEOPLE)]
            over.set()
        assert {answered.status for answered in (*answers, *again)} == {200}
        assert {answered.worker for answered in again} <= {"w0", "w2"}
        assert [answered.cached_tokens for answered in again] == [found_tokens] * PEOPLE
        if tokens:
            assert (told["handover"]["listed"], told["handover"]["failed"]) == (PEOPLE, 0)
            assert told["handover"]["spent_tokens"] == PEOPLE * REUSABLE_TOKENS
