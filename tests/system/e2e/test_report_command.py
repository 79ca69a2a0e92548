"""`router report` as it is typed, of a real router and of its journal, with tenants, prefixes and evictions."""

import asyncio
import html
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.support.forked import Ended
from tests.system.e2e.client import Client
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.typed import typed

BLOCKS = 10
SMALL = ("engine.total_kv_blocks=96", "engine.max_seq_len=1024")
"""Room for some eight of the prompts."""
HOSTILE = '"><script>,{}|`'
LONG = "x" * 300


async def reported(*arguments: str) -> Ended:
    return await typed("-m", "router", "report", *arguments)


def rows(ended: Ended, dimension: str) -> dict[str, Any]:
    return {row["name"]: row for row in ended.json["by"][dimension]["rows"]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[FleetProcesses]:
    """Two workers with very small caches, and a router that tells tenants apart by a header."""
    settings = (*QUIET_ROUTER, "queue.fair_share_by=x-tenant-id")
    async with FleetProcesses(
        FleetShape(workers=2, worker_settings=(*FAST_WORKER, *SMALL), router_settings=settings)
    ) as running:
        yield running


def prompt(family: int, own: int = 0) -> list[int]:
    """Return a prompt of a family of which half is its own."""
    tokens = [family] * (BLOCKS // 2 * 16) + [own] * (BLOCKS // 2 * 16)
    return [*tokens, 1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_and_its_journal_report_what_was_reused_and_by_whom(
    fleet: FleetProcesses, client: Client
) -> None:
    router, journal = ("--router", fleet.control_url), ("--journal", "--nats-url", fleet.nats_url)
    assert (await reported(*router, "--json")).json["total"]["requests"] == 0
    reused = 0
    for number in range(12):
        answer = await client.complete(prompt(1), x_tenant_id=f"tenant-{number % 2}")
        await client.until_index_has(answer.worker)
        reused += answer.cached_tokens
    for name in (HOSTILE, LONG, ""):
        reused += (await client.complete(prompt(2, own=9), x_tenant_id=name)).cached_tokens
    live = await reported(*router, "--json")
    total = live.json["total"]
    assert (total["requests"], total["compared_requests"], total["prompt_tokens"]) == (15, 15, 15 * (160 + 1))
    assert (total["reused_tokens"], total["reported_tokens"]) == (reused, reused)
    assert total["routing_tokens"] > 0
    assert total["saved_s"] > total["baseline_s"] > 0.0
    tenants = rows(live, "tenant")
    assert tenants.keys() >= {"tenant-0", "tenant-1", HOSTILE, "anonymous"}
    assert [name for name in tenants if name.startswith("value-")], "a name that is too long is replaced by its hash"
    assert tenants["tenant-0"]["requests"] == tenants["tenant-1"]["requests"] == 6
    assert [row["requests"] for row in live.json["by"]["prefix"]["rows"]] == [12, 3]

    async with asyncio.timeout(60):  # the journal is written behind the answers
        while True:
            kept = await reported(*journal, "--json")
            if kept.json["total"]["requests"] == 15:
                break
    assert kept.json["source"] == "journal"
    for part in ("total", "by", "not_counted"):
        assert kept.json[part] == live.json[part]
    as_text, as_page = await asyncio.gather(reported(*router, "--by", "tenant"), reported(*router, "--html"))
    text, page = as_text.out, as_page.out
    assert f"reused: {reused} tokens" in text
    assert "PREFIX" not in text
    assert any(line.startswith("tenant-0  ") for line in text.splitlines())
    assert f"<p>Reused: {reused} tokens" in page
    assert html.escape(HOSTILE) in page
    assert "<script>" not in page


@pytest.mark.asyncio(loop_scope="module")
async def test_what_ranks_evict_is_charged_to_the_requests_that_came_before(
    fleet: FleetProcesses, client: Client
) -> None:
    for number in range(40):
        answer = await client.complete(prompt(100 + number, own=200 - number), x_tenant_id="newcomer")
    await client.until_index_has(answer.worker)
    async with asyncio.timeout(60):
        while True:
            found = await reported("--evictions", "--nats-url", fleet.nats_url, "--json")
            if rows(found, "tenant").get("newcomer", {}).get("requests") == 40:
                break
    removed, evicted = found.json["removed_blocks"], rows(found, "tenant")["newcomer"]["evicted_blocks"]
    assert 100 < evicted <= found.json["total"]["evicted_blocks"] <= removed
    assert evicted <= 40 * (BLOCKS + 1)
    text = (await reported("--evictions", "--nats-url", fleet.nats_url)).out
    assert f"evicted: {removed} blocks by the ranks" in text
    assert "EVICTED" in text
