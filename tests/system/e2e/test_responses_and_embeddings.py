"""`/v1/responses` and `/v1/embeddings` by the `openai` SDK, through router and agents; their journal is replayed."""

import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.replays import figure, replayed

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[FleetProcesses]:
    """Two workers, of which `w1` alone states embeddings."""
    shape = FleetShape(
        workers=2,
        worker_settings=FAST_WORKER,
        router_settings=(*QUIET_ROUTER, "journal.router=r1"),
        more_settings={"w1": ("engine.embeddings=true",)},
    )
    async with FleetProcesses(shape) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sdk(fleet: FleetProcesses) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet.data_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_embeddings_go_to_the_worker_that_states_them(fleet: FleetProcesses, sdk: openai.AsyncOpenAI) -> None:
    answers = [await sdk.embeddings.with_raw_response.create(model=MODEL, input=["a", "b", "a"]) for _ in range(4)]
    assert {each.headers["x-worker-instance-id"] for each in answers} == {"w1"}
    read = answers[0].parse()
    first, second, third = (each.embedding for each in read.data)
    assert first == third != second
    assert math.isclose(math.hypot(*first), 1.0, abs_tol=1e-5)
    assert read.usage.prompt_tokens == 3
    async with aiohttp.ClientSession() as session:
        client = Client(session, fleet.data_url, fleet.control_url)
        found = await client.control(f"/v1/decisions/{answers[0].headers['x-decision-id']}")
    assert "An embedding reuses no KV prefix" in found["explanation"]


async def test_the_second_turn_goes_to_the_worker_that_holds_the_first(
    fleet: FleetProcesses, sdk: openai.AsyncOpenAI
) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, fleet.data_url, fleet.control_url)
        for number in range(4):
            turns: list[Any] = [{"role": "user", "content": f"{number}: how is the weather in Paris? " * 6}]
            first = await sdk.responses.with_raw_response.create(model=MODEL, input=turns, max_output_tokens=24)
            holder = first.headers["x-worker-instance-id"]
            await client.until_index_has(holder)
            turns += [*first.parse().output, {"role": "user", "content": "And tomorrow?"}]
            second = await sdk.responses.with_raw_response.create(model=MODEL, input=turns, max_output_tokens=24)
            assert second.headers["x-worker-instance-id"] == holder
            assert int(second.headers["x-overlap-blocks"]) >= 12
            usage = second.parse().usage
            assert usage is not None
            assert usage.input_tokens_details.cached_tokens >= 12 * 16


async def test_the_journal_of_all_this_is_replayed_exactly(fleet: FleetProcesses, sdk: openai.AsyncOpenAI) -> None:
    await sdk.embeddings.create(model=MODEL, input="the last one")
    report = await replayed(fleet.nats_url)
    while figure("equal", report) < 4 + 8 + 1:
        report = await replayed(fleet.nats_url)
    assert (figure("different", report), figure("not exact", report)) == (0, 0), report
