"""One control plane of several processes: decisions, doubts of workers, metrics."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from kv_runtime.clock import Clock
from kv_runtime.telemetry import Projection
from router.processes.front import LEAST, SUMMED, Front, doubted_workers, merged
from router.processes.supervisor import Links
from tests.support.metric_families import COMMANDS
from tests.support.served import served

EVIDENCE = {"doubt": "overpredicted", "requests": 16, "overpredicted": 16, "underpredicted": 0, "newest_decision": "d"}
KNOWN_TO_ALL = (
    "breaker_state", "build_info", "encoder_info", "expected_output_tokens", "freshness_seconds", "index_",
    "journal_checkpoint_", "ledger_", "live_", "log_bytes", "log_purged_seq", "moments", "nats_server_up", "planner_",
    "policy_info", "process_up", "rank_trust", "rate_factor", "replica_skew_", "server_connections",
    "shadow_budget_seconds", "snapshot_", "stream_", "worker",
)  # fmt: skip
"""Beginnings of the names of gauges that are the same in all processes, or are those of one alone."""
NAMES = ("s0", "s1")
GONE = "http://127.0.0.1:1"


class Process:
    """A process that says which it is, takes every change."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bodies: list[tuple[str, bytes]] = []
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = self._echo

    async def _echo(self, request: web.Request) -> web.Response:
        self.bodies.append((request.method, await request.read()))
        return web.json_response({"by": self.name, "budget_us": 5, "asked": request.raw_path})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self.answer)])
        async with served(app) as url:
            yield url


@asynccontextmanager
async def front_of(**urls: str) -> AsyncIterator[tuple[aiohttp.ClientSession, Front]]:
    async with Links(NAMES, Clock()) as links:
        for name, url in urls.items():
            links.urls[name] = url
        front = Front(links, list, CollectorRegistry())
        async with served(front.app(token="")) as url, aiohttp.ClientSession(url) as session:
            yield session, front


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, Any]:
    async with response:
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize(
    "path", ["/v1/decisions", "/v1/workers", "/v1/shadows", "/v1/index", "/v1/fleet", "/v1/report", "/v1/trends"]
)
async def test_that_no_process_answers_is_said(path: str) -> None:
    async with front_of(s0=GONE, s1=GONE) as (session, _):
        status, error = await error_of(await session.get(path))
        assert (status, error["code"]) == (503, "no_process")


async def test_an_answer_that_comes_in_pieces_is_read_whole() -> None:
    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (b'{"workers":', b"[]}"):
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    process = Process("s0")
    process.answer = in_pieces
    async with process.serving() as url, front_of(s0=url) as (session, _):
        assert await (await session.get("/v1/workers")).json() == {"workers": []}


async def test_a_wrong_parameter_is_refused_without_asking() -> None:
    async with front_of() as (session, _):
        status, error = await error_of(await session.get("/v1/decisions?limit=x"))
        assert (status, error["param"], error["message"]) == (400, "limit", 'limit: found "x", allowed 1..1000')


async def test_what_all_processes_know_is_asked_of_the_first_that_serves() -> None:
    async with Process("s1").serving() as url, front_of(s0=GONE, s1=url) as (session, _):
        answer = await (await session.get("/v1/index?a=b%26c")).json()
        assert (answer["by"], answer["asked"]) == ("s1", "/v1/index?a=b%26c")


@pytest.mark.parametrize("method", ["PATCH", "PUT", "DELETE"])
async def test_the_processes_that_did_not_take_a_changed_policy_are_named(method: str) -> None:
    first = Process("s0")
    async with first.serving() as url, front_of(s0=url) as (session, front):
        status, error = await error_of(await session.request(method, "/v1/policy", data=b'{"mode": "random"}'))
        assert (status, error["code"]) == (503, "not_confirmed")
        assert error["message"].startswith("s1 did not confirm the change")
        assert (first.bodies, b'"by"' in front.policy) == ([(method, b'{"mode": "random"}')], True)


async def test_a_policy_changes_nowhere_without_the_process_that_stores_it() -> None:
    other = Process("s1")
    async with other.serving() as url, front_of(s1=url) as (session, front):
        status, error = await error_of(await session.put("/v1/policy", data=b'{"mode": "random"}'))
        assert (status, error["code"]) == (503, "no_process")
        assert (other.bodies, front.policy) == ([], b"")


async def test_a_changed_policy_goes_whole_to_the_other_processes() -> None:
    other = Process("s1")
    async with Process("s0").serving() as first, other.serving() as url, front_of(s0=first, s1=url) as (session, front):
        async with session.patch("/v1/policy", data=b'{"mode": "random"}') as response:
            assert (response.status, await response.read()) == (200, front.policy)
        assert other.bodies == [("PUT", front.policy)]


def workers(trust: str = "EXACT", reason: str = "", evidence: Any = None) -> dict[str, Any]:
    rank = {"worker_id": "w0", "dp_rank": 0, "trust": trust, "trust_reason": reason, "evidence": evidence, "unfit": ""}
    return {"workers": [{"ranks": [rank]}]}


def test_a_rank_that_one_process_doubts_is_shown_with_its_evidence() -> None:
    doubted = workers("DEGRADED", "overpredicted", EVIDENCE)
    assert doubted_workers([workers(), workers(), doubted]) == doubted


def test_doubts_replace_nothing_else_and_without_any_the_workers_are_as_they_are() -> None:
    stale = workers("DEGRADED", "behind")
    assert doubted_workers([workers("DEGRADED", "behind"), workers("FALLBACK", "underpredicted", EVIDENCE)]) == stale
    assert doubted_workers([workers(), workers()]) == workers()


def page(families: list[Metric]) -> bytes:
    return generate_latest(Projection(CollectorRegistry(), lambda: families))


def process(requests: float, inflight: float, connected: float, workers: float, ttft: tuple[int, int]) -> list[Metric]:
    """Return the families of one process, as its exposition has them."""
    counted = CounterMetricFamily("kvrouter_requests", "Requests", labels=("outcome",))
    counted.add_metric(("ok",), requests)
    gauges = [
        GaugeMetricFamily("kvrouter_inflight_requests", "Now", value=inflight),
        GaugeMetricFamily("kvrouter_log_connected", "Connected", value=connected),
        GaugeMetricFamily("kvrouter_workers", "Workers", value=workers),
    ]
    below, all_of_them = ttft
    spread = HistogramMetricFamily("kvrouter_ttft_seconds", "TTFT")
    spread.add_metric((), [("0.1", below), ("+Inf", all_of_them)], all_of_them * 0.5)
    return list(text_string_to_metric_families(page([counted, *gauges, spread]).decode()))


def samples(families: list[Metric]) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_counts_and_parts_are_summed_and_what_all_know_is_shown_once() -> None:
    both = merged([process(3, 1, 1, 4, (2, 3)), process(4, 2, 0, 5, (1, 4))])
    assert samples(both) == {
        ("kvrouter_requests_total", "ok"): 7,
        ("kvrouter_inflight_requests", ""): 3,
        ("kvrouter_log_connected", ""): 0,
        ("kvrouter_workers", ""): 5,
        ("kvrouter_ttft_seconds_bucket", "0.1"): 3,
        ("kvrouter_ttft_seconds_bucket", "+Inf"): 7,
        ("kvrouter_ttft_seconds_count", ""): 7,
        ("kvrouter_ttft_seconds_sum", ""): 3.5,
    }


def test_one_process_stays_as_it_is_and_so_does_a_label_that_one_alone_has() -> None:
    alone = process(3, 1, 1, 4, (2, 3))
    assert page(merged([alone])) == page(process(3, 1, 1, 4, (2, 3)))
    other = CounterMetricFamily("kvrouter_requests", "Requests", labels=("outcome",))
    other.add_metric(("failed",), 2)
    both = samples(merged([alone, [other]]))
    assert (both["kvrouter_requests_total", "ok"], both["kvrouter_requests_total", "failed"]) == (3, 2)


def test_every_gauge_of_the_router_has_a_rule() -> None:
    gauges = {name for name, family in COMMANDS["router"].items() if family.kind == "gauge"}
    known_to_all = {name for name in gauges if name.removeprefix("kvrouter_").startswith(KNOWN_TO_ALL)}
    assert gauges == SUMMED | LEAST | known_to_all
    assert len(gauges) == len(SUMMED) + len(LEAST) + len(known_to_all)
