"""Labels that an agent gives its worker: requests require a taint, and KV stays within a transfer domain."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER

PROMPT = list(range(64))
LABELS = {
    "plain": (),
    "spot": ('worker.taints=["spot", "big gpu"]',),
    "prefill": ("worker.role=prefill", "worker.transfer_domain=rack-1"),
    "near": ("worker.role=decode", "worker.transfer_domain=rack-1"),
    "far": ("worker.role=decode", "worker.transfer_domain=rack-2"),
}


async def client_of(*workers: str) -> AsyncIterator[Client]:
    shape = FleetShape(
        ids=workers, worker_settings=FAST_WORKER, more_settings=LABELS, router_settings=QUIET_ROUTER, mode="round-robin"
    )
    async with FleetProcesses(shape) as fleet, aiohttp.ClientSession() as session:
        yield Client(session, fleet.data_url, fleet.control_url)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tainted() -> AsyncIterator[Client]:
    async for client in client_of("plain", "spot"):
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def split() -> AsyncIterator[Client]:
    async for client in client_of("prefill", "near", "far"):
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_a_required_taint_is_found_where_it_is_configured(tainted: Client) -> None:
    answers = [await tainted.complete(PROMPT, x_required_taints="big gpu") for _ in range(4)]
    assert {answer.worker for answer in answers} == {"spot"}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_taint_that_no_worker_has_is_named(tainted: Client) -> None:
    refused = await tainted.complete(PROMPT, x_required_taints="tpu")
    assert refused.status == 400
    assert "taint 'tpu' is required" in refused.body["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_that_require_no_taint_go_to_all(tainted: Client) -> None:
    assert {(await tainted.complete(PROMPT)).worker for _ in range(4)} == {"plain", "spot"}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_is_decoded_in_the_domain_where_it_was_computed(split: Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    answers = [await split.post("/v1/completions", body) for _ in range(4)]
    assert {(answer.headers["x-prefill-instance-id"], answer.worker) for answer in answers} == {("prefill", "near")}
