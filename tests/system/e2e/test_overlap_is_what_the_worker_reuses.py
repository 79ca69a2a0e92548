"""Prediction against truth through every real hop: block for block, request after request, evictions included.

And what router and worker show of it: the metrics that `docs/reference/metrics.md` lists for them, and no other.
"""

import random

import pytest

from kv_runtime.http.server import CONTROL_CONNECTIONS_MAX
from tests.support.metric_families import COMMANDS, shown_families
from tests.system.e2e.client import Client
from tests.system.e2e.conftest import BLOCK_SIZE
from tests.system.faults.scraped import scrape

REQUESTS = 200
SEED = 20_241
OF_ENCODE_WORKERS = ("kvrouter_encode_", "kvrouter_embedding_")


@pytest.mark.asyncio(loop_scope="module")
async def test_x_overlap_blocks_equals_cached_blocks_for_200_requests_in_a_row(client: Client) -> None:
    draw = random.Random(SEED)
    stems = [[draw.randrange(256) for _ in range(draw.randrange(20, 600))] for _ in range(8)]
    overlapping, wrong = 0, []
    for number in range(REQUESTS):
        stem = draw.choice(stems)
        prompt = stem[: draw.randrange(1, len(stem) + 1)] + [draw.randrange(256) for _ in range(draw.randrange(60))]
        answered = await client.complete(prompt, max_tokens=draw.randrange(1, 40))
        assert answered.status == 200
        if answered.overlap_blocks * BLOCK_SIZE != answered.cached_tokens:
            wrong.append((number, answered.worker, answered.overlap_blocks, answered.cached_tokens))
        overlapping += answered.overlap_blocks > 0
        stems.append(prompt)
        await client.until_index_has(answered.worker)
    assert wrong == [], f"seed {SEED}"
    assert overlapping > REQUESTS // 4, f"seed {SEED}: too few overlaps to prove anything"


@pytest.mark.asyncio(loop_scope="module")
async def test_caches_were_small_enough_that_blocks_were_removed(client: Client) -> None:
    samples = (await client.scrape()).samples
    held = [
        value for name, labels, value in samples if name == "kvrouter_index_blocks" and labels.get("medium") == "gpu"
    ]
    assert held
    assert all(0 < blocks <= 400 for blocks in held)
    workers = [await scrape(client.session, await client.base_url(worker_id)) for worker_id in ("w0", "w1")]
    assert sum(each.total("mirror_blocks_changed_total", kind="removed") for each in workers) > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_router_counted_predicted_and_actual_tokens_alike(client: Client) -> None:
    shown = await client.scrape()
    predicted, actual = (
        {worker: shown.total(f"{name}_cached_tokens_total", worker=worker) for worker in ("w0", "w1")}
        for name in ("predicted", "actual")
    )
    assert predicted == actual
    assert sum(actual.values()) > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_router_and_worker_show_the_metrics_that_are_listed(client: Client) -> None:
    of_worker = {name for name in COMMANDS["worker-agent serve"] if not name.startswith(OF_ENCODE_WORKERS)}
    for url, listed in ((client.control_url, {*COMMANDS["router"]}), (await client.base_url("w0"), of_worker)):
        async with client.session.get(f"{url}/metrics") as response:
            shown = await response.text()
        assert shown_families(shown) == listed
        if url == client.control_url:  # it has a bound of its own
            assert f"kvrouter_server_connections_max {CONTROL_CONNECTIONS_MAX}.0" in shown.splitlines()
