"""Every query of the dashboards, asked of a real Prometheus that scraped a real fleet which lived through something.

The fleet: a router and `router pools` before it, a stand-alone index, three simulated workers with small caches, a
prefill and a decode worker of another model, a nats-server. While requests flow, streamed ones too, a worker is killed
in the middle of some and comes back, the log discards what a second index has not read, so that it resyncs, the router
has a burst in its queue and is restarted, and another worker is killed for good.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import FleetShape, free_ports
from kv_runtime.clock import Clock
from tests.support.otlp_sink import OtlpSink
from tests.support.paths import ROOT
from tests.support.processes import agent_process
from tests.system.dashboards.picture import picture
from tests.system.dashboards.prometheus import NoData, Prometheus, start_pools
from tests.system.dashboards.shipped import (
    ALERTS,
    BOARD_NAMES,
    OF_ENGINES,
    RULES,
    LabelValues,
    Shown,
    annotation_queries,
    board,
    panel_queries,
    selectors,
    substituted,
    variables,
)
from tests.system.faults.fleet import QUIET, READY_S, SMALL_CACHE, WORKER, Fleet, fleet, freeze
from tests.system.faults.stream_reader import squeezed
from tests.system.faults.traffic import MODEL, TENANTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
"""The first test waits for all that the fleet lives through."""

INTERVAL, WINDOW = "10s", "5m"
"""What Grafana puts in place of `$__rate_interval` for a scrape every second or two, and of `$__range`."""
_WORKER = (*WORKER, *SMALL_CACHE, "engine.speed=4", "events.batch_ring_bytes_max=0")
"""Answers take so long that a scrape finds some on their way; agents keep no batches, so that recoveries are dumps."""
QUEUE = ("queue.threshold=0", "queue.requests_max=64")
FEW_BYTES = 4096
"""Of the log, while it discards."""
BURST = 300
"""Requests of which a hundred are open at once, as many as a session opens; the queue has room for fewer."""
PHASES_MODEL = "sim-phases"
PHASES = {"p0": "prefill", "d0": "decode"}
OFFSET_S = 90.0
"""Annotations look a minute back; asked about the future, Prometheus answers from what it scraped last."""
SHADOWS = "[{name: soonest, policy: {mode: predicted-ttft}}, {name: patient, policy: {ttft_weight: 1}}]"
_STREAMED, _ANSWERS = 12, 25
_LOOK_S = 0.02


ATTACHED = "no engine is attached"
_IN_PROCESS = "simulated engines neither load, nor die, nor have logits processors and canaries"
PUBLISHES = "no engine publishes its events"
_MEDIA = "no worker takes or encodes media"
_NATS_SERVER = "no process embeds the nats-server"
WITHOUT_SERIES = {
    **dict.fromkeys(("engine_attached", "engine_metrics_age_seconds", "engine_metrics_not_shown"), ATTACHED),
    **dict.fromkeys(("engine_questions_total", "forwarded_inflight_requests", "forwarded_requests_total"), ATTACHED),
    **dict.fromkeys(("engine_canaries_total", "engine_dead", "engine_failed_requests_total"), _IN_PROCESS),
    **dict.fromkeys(("engine_load_seconds", "logits_processor_errors_total"), _IN_PROCESS),
    **dict.fromkeys(("refused_messages_total", "zmq_gaps_total", "zmq_lost_total"), PUBLISHES),
    **dict.fromkeys(("zmq_replays_total", "zmq_restarts_total"), PUBLISHES),
    **dict.fromkeys(("embedding_cache_bytes", "embedding_lookups_total"), _MEDIA),
    **dict.fromkeys(("encode_inflight_requests", "encode_requests_total"), _MEDIA),
    **dict.fromkeys(("media_loaded_total", "media_refused_total"), _MEDIA),
    **dict.fromkeys(("nats_server_restarts_total", "nats_server_up"), _NATS_SERVER),
    **dict.fromkeys(OF_ENGINES, ATTACHED),
}
"""Metrics of which this fleet has no series, and why: their queries must be understood, and may have no answer."""


class Lived(NamedTuple):
    """A Prometheus, and between which times the fleet lived."""

    prometheus: Prometheus
    began_s: float
    ended_s: float
    traces: frozenset[str]
    """The traces that the collector got."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def lived(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lived]:
    directory = tmp_path_factory.mktemp("prometheus")
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        sink = cleanup.enter_context(OtlpSink())
        tracing, shadows = f"tracing.endpoint={sink.url}", f"shadow.policies={SHADOWS}"
        settings = (*QUIET, tracing, shadows, "queue.fair_share_by=x-tenant-id", *QUEUE)
        shape = FleetShape(workers=3, nats_servers=1, worker_settings=_WORKER, router_settings=settings)
        running = await cleanup.enter_async_context(fleet(shape))
        for worker_id, role in PHASES.items():
            assigned = [part for setting in (*_WORKER, f"worker.role={role}") for part in ("--set", setting)]
            worker = agent_process(worker_id, running.nats_url, "--model", PHASES_MODEL, *assigned)
            await running.add_worker(worker)
            running.worker_urls[worker_id] = (await worker.line_with(f"worker {worker_id} on")).split()[3]
        prometheus = Prometheus(session, directory)
        running.index_urls["index-2"] = f"http://127.0.0.1:{free_ports(1)[0]}"
        pools_url, pools_control_url = await start_pools(cleanup, running, directory)
        jobs = {
            "kv-router": [running.urls["router"]],
            "kv-router-agents": [running.urls[worker_id] for worker_id in (*running.worker_ids, *PHASES)],
            "kv-router-indexes": [running.urls["index"], running.urls["index-2"]],
            "kv-router-pools": [pools_control_url],
        }
        await prometheus.start(cleanup, jobs)
        began_s = time()
        await live(running, prometheus, pools_url)
        yield Lived(prometheus, began_s, time(), frozenset(span.trace_id for span in sink.spans))


async def live(running: Fleet, prometheus: Prometheus, pools_url: str) -> None:
    """Requests flow, a worker dies, an index resyncs, the router restarts, its queue is full; Prometheus saw it."""
    async with running.traffic() as sent:
        await sent.more(_ANSWERS)
        await prometheus.until('sum(kvrouter_requests_total{outcome="ok"}) > 0', READY_S)
        freeze(running.workers["w1"])
        await running.until_promised("w1")
        await running.kill("w1")
        await sent.more(_ANSWERS)
        await prometheus.until('kvrouter_rank_fit{worker="w1"} == 0', READY_S)
        await running.start_again("w1")
        await prometheus.until('kvrouter_rank_fit{worker="w1"} == 1', READY_S)
        async with squeezed(running.nats_urls, FEW_BYTES):
            await sent.more(2 * _ANSWERS)
            await running.start_index("index-2", port=port_of(running.urls["index-2"]))
            resynced = "sum(kvrouter_stream_resyncs_total) > 0 and max(kvrouter_stream_last_healing_seconds) > 0"
            await prometheus.until(resynced, READY_S)
        await overflow(running, prometheus)
        await asyncio.gather(*(stream(running, running.data_url, number, PHASES_MODEL) for number in range(_STREAMED)))
        await running.stop("router")
        await running.start_again("router")
        await running.until_ready()
        await asyncio.gather(*(stream(running, running.data_url, number) for number in range(_STREAMED)))
        await asyncio.gather(*(stream(running, pools_url, number) for number in range(_STREAMED)))
        await sent.more(_ANSWERS)
        answers = f'sum(kvrouter_requests_total{{outcome="ok"}}) >= {_STREAMED + _ANSWERS}'
        await running.kill("w2")
        await prometheus.until('kvrouter_rank_fit{worker="w2"} == 0', READY_S)
        await prometheus.until(f"{answers} and sum(resets(kvrouter_event_loop_lag_seconds_count[1m])) > 0", READY_S)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def overflow(running: Fleet, prometheus: Prometheus) -> None:
    """Send bursts until a scrape has found requests in the router's queue."""
    async with asyncio.timeout(READY_S):
        while not await prometheus.api("query", query="max_over_time(kvrouter_queued_requests[5m]) > 0"):
            await asyncio.gather(*(complete(running, number) for number in range(BURST)))


async def complete(running: Fleet, number: int) -> None:
    """One request of a burst: it is answered, or refused because the queue is full."""
    body = {"model": MODEL, "prompt": [number] * 900, "max_tokens": 1}
    async with running.session.post(f"{running.data_url}/v1/completions", json=body) as response:
        assert response.status in (200, 503), await response.text()


async def stream(running: Fleet, data_url: str, number: int, model: str = MODEL) -> None:
    """Stream one answer with its usage; send the request again while the router's queue is full."""
    prompt = [number, *range(200), *range(number)]
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    body = {"model": model, "prompt": prompt, **options}
    async with asyncio.timeout(READY_S):
        while not await is_streamed(running, f"{data_url}/v1/completions", body):
            await Clock().sleep(_LOOK_S)


async def is_streamed(running: Fleet, url: str, body: dict[str, Any]) -> bool:
    """Return whether the request was answered to its end; False: there was no room for it."""
    async with running.session.post(url, json=body) as response:
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return False
        assert response.status == HTTPStatus.OK, await response.text()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        return True


def has_no_series(shown: Shown) -> bool:
    return any(str(each.name).removeprefix("kvrouter_") in WITHOUT_SERIES for each in selectors(shown.expr))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("shown", panel_queries(), ids=str)
async def test_every_query_of_every_panel_has_data(lived: Lived, shown: Shown) -> None:
    expr = substituted(shown.expr, interval=INTERVAL, window=WINDOW)
    if has_no_series(shown):
        await lived.prometheus.api("query", query=expr, time=f"{lived.ended_s}")
    elif shown.is_range:
        await lived.prometheus.range(expr, lived.began_s, lived.ended_s)
    else:
        await lived.prometheus.instant(expr, lived.ended_s)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BOARD_NAMES)
async def test_every_dashboard_is_drawn(lived: Lived, name: str, tmp_path: Path) -> None:
    answers, without = {}, set[str]()
    for shown in (each for each in panel_queries() if each.board == name):
        expr = substituted(shown.expr, interval=INTERVAL, window=WINDOW)
        found = await lived.prometheus.series(expr, lived.began_s, lived.ended_s)
        answers[shown.panel, shown.ref_id] = found
        without |= set() if found else {shown.panel}
    drawn, empty = picture(board(name), answers)
    assert set(empty) <= without
    directory = Path(os.environ.get("KVROUTER_FIGURES", tmp_path))
    (directory / f"dashboard_{name}.png").write_bytes(drawn)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("shown", [each for each in panel_queries() if each.has_exemplars], ids=str)
async def test_exemplars_lead_to_traces_that_the_collector_has(lived: Lived, shown: Shown) -> None:
    expr = substituted(shown.expr, interval=INTERVAL, window=WINDOW)
    times = {"start": f"{lived.began_s}", "end": f"{lived.ended_s}"}
    found = await lived.prometheus.api("query_exemplars", query=expr, **times)
    traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert traces
    assert traces & lived.traces, "the newest may still wait to be sent"
    assert all(exemplar["labels"]["decision_id"] for series in found for exemplar in series["exemplars"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("shown", annotation_queries(), ids=str)
async def test_every_annotation_found_what_happened(lived: Lived, shown: Shown) -> None:
    expr = substituted(shown.expr, interval=INTERVAL, window=WINDOW)
    await lived.prometheus.range(expr, lived.began_s, lived.ended_s + OFFSET_S)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "counted",
    [
        *(f'kvrouter_cost_term_seconds_sum{{term="{term}"}}' for term in ("prefill", "lateness", "decode")),
        'kvrouter_rate_factor{work="prefill"}',
        "kvrouter_expected_output_tokens",
        "kvrouter_decision_margin_seconds_count",
        *(f'kvrouter_savings_prompt_tokens_total{{by="tenant",name="tenant-{number}"}}' for number in range(TENANTS)),
        'kvrouter_savings_reused_tokens_total{by="prefix",known="reported"}',
        'kvrouter_savings_baseline_tokens_total{by="all"}',
        'kvrouter_savings_prefill_seconds_total{by="model",rate="learnt"}',
        'kvrouter_worker_failures_total{worker="w1"}',
        "kvrouter_retries_total",
        'kvrouter_shadow_decisions_total{shadow="soonest"}',
        'kvrouter_rank_fit{worker="w1"} == 0',
        "kvrouter_stream_resyncs_total",
        "kvrouter_stream_gaps_total",
        "kvrouter_queued_requests",
        "kvrouter_queue_wait_seconds_count",
        'kvrouter_rejected_total{reason="queue_full"}',
        'kvrouter_kv_transfer_bytes_total{worker="d0"}',
    ],
)
async def test_what_the_fleet_lived_through_was_counted(lived: Lived, counted: str) -> None:
    expr = counted if "==" in counted else f"{counted} > 0"
    await lived.prometheus.range(expr, lived.began_s, lived.ended_s)


@pytest.mark.asyncio(loop_scope="module")
async def test_every_rule_can_be_evaluated_on_what_real_processes_show(lived: Lived) -> None:
    groups = await lived.prometheus.api("rules")
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] == "err"} == {}
    assert {alert.alert for alert in ALERTS} <= {rule["name"] for rule in rules if rule["health"] == "ok"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "expr",
    [
        *(rule.record for rule in RULES if rule.record.endswith("_rate5m")),
        'ALERTS{alertname="KvRouterAgentDown",alertstate="pending"}',
    ],
)
async def test_objectives_are_recorded_and_a_dead_agent_is_on_its_way_to_an_alert(lived: Lived, expr: str) -> None:
    await lived.prometheus.range(expr, lived.began_s, lived.ended_s)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("variable", variables(), ids=str)
async def test_every_variable_has_values(lived: Lived, variable: LabelValues) -> None:
    expected = {"model": {MODEL, PHASES_MODEL, "unknown"}, "worker": {"w0", "w1", "w2", *PHASES}}[variable.name]
    assert set(await lived.prometheus.label_values(variable.metric, variable.label)) == expected


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ("kvrouter_no_such_metric", "empty"),
        ('kvrouter_requests_total{mode="no-such"}', "empty"),
        ("0 * sum(kvrouter_workers) / 0", "not a number"),
        ("rate(kvrouter_requests_total)", "expected type range vector"),
    ],
)
async def test_a_planted_query_without_data_is_found(lived: Lived, planted: str, complaint: str) -> None:
    with pytest.raises(NoData, match=complaint):
        await lived.prometheus.range(planted, lived.began_s, lived.ended_s)
    with pytest.raises(NoData, match=complaint):
        await lived.prometheus.instant(planted, lived.ended_s)


def test_the_example_of_what_to_scrape_is_one_that_prometheus_reads() -> None:
    example = ROOT / "configs" / "prometheus.yml"
    checked = subprocess.run(["promtool", "check", "config", example], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
