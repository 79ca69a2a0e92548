"""Pools of both modes behind real routers, with simulated engines and with TensorRT-LLM's over the fake package.

Prefill and decode in pools of their own give the same text as one worker, and each prompt is prefilled once.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.support.processes import ENGINE, agent_process, with_fake
from tests.system.e2e.client import MODEL
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.test_pools import CONFIG as AGG_CONFIG
from tests.system.e2e.test_pools import PoolsProcess, pools_process
from tests.system.faults.scraped import scrape

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
UNREACHABLE_URL = "http://127.0.0.1:1"
ENGINES = ("simulated", "trtllm")
TRANSFER = (
    "--trtllm.cache_transceiver_config.backend",
    "UCX",
    "--trtllm.cache_transceiver_config.max_tokens_in_buffer",
    "4096",
)
PROMPTS = [f"person {number} says " + "words and words " * number for number in range(8)]
CONFIG: dict[str, Any] = {
    "enable_priority_retry": True,
    "num_prefill_pools": 1,
    "num_decode_pools": 2,
    "prefill_pool_dynamo_namespaces": ["pre"],
    "decode_pool_dynamo_namespaces": ["gone", "dec"],
    "prefill_pool_selection_strategy": {
        "isl_min": 0, "isl_max": 32000, "isl_resolution": 1, "ttft_min_ms": 0, "ttft_max_ms": 1000,
        "ttft_resolution": 1, "prefill_pool_mapping": [[0]],
    },
    "decode_pool_selection_strategy": {
        "context_length_min": 0, "context_length_max": 32000, "context_length_resolution": 1,
        "itl_min_ms": 0, "itl_max_ms": 100, "itl_resolution": 1, "decode_pool_mapping": [[0]],
    },
}  # fmt: skip


class OneWorker(FleetProcesses):
    """A router, and one worker of a role, with an engine of a kind."""

    def __init__(self, engine: str, role: str) -> None:
        settings = (*QUIET_ROUTER, "disaggregation.accept_params=true")
        workers = (*FAST_WORKER, f"worker.role={role}")
        super().__init__(FleetShape(workers=1, worker_settings=workers, router_settings=settings))
        self._engine, self._role = engine, role

    async def start_worker(self, worker_id: str) -> str:
        """The worker runs; return its address."""
        if self._engine == "simulated":
            return await super().start_worker(worker_id)
        role = ("--set", f"worker.role={self._role}", *(() if self._role == "aggregated" else TRANSFER))
        agent = agent_process(worker_id, self.nats_url, *ENGINE, *role)
        await self.add_worker(agent, with_fake())
        return (await agent.line_with(f"worker {worker_id} on")).split()[3]


class Running(NamedTuple):
    """Pools that serve one phase each, one that serves whole requests, and its router."""

    disagg: PoolsProcess
    agg: PoolsProcess
    whole: FleetProcesses
    session: aiohttp.ClientSession

    async def ask(self, url: str, path: str, body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        async with self.session.post(f"{url}{path}", json={"model": MODEL, "max_tokens": 12} | body) as response:
            answer = await response.read()
            assert response.status == 200, answer
            return {name.lower(): value for name, value in response.headers.items()}, answer

    async def attempts(self, phase: str, pool: str) -> float:
        """Return how many requests the pool has answered in that phase."""
        shown = await scrape(self.session, self.disagg.control_url)
        return shown.total("pool_attempts_total", outcome="ok", phase=phase, pool=pool)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=ENGINES)
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    files = tmp_path_factory.mktemp("pools") / "disagg.json", tmp_path_factory.mktemp("pools") / "agg.json"
    for file, config in zip(files, (CONFIG, AGG_CONFIG), strict=True):
        file.write_text(json.dumps(config))
    async with (
        OneWorker(request.param, "prefill") as pre,
        OneWorker(request.param, "decode") as dec,
        OneWorker(request.param, "aggregated") as whole,
        aiohttp.ClientSession() as session,
    ):
        places = (
            f"--pool=pre={pre.data_url},{pre.control_url}",
            f"--pool=dec={dec.data_url}",
            f"--pool=gone={UNREACHABLE_URL}",
        )
        both = (f"--pool=fast={whole.data_url}", f"--pool=slow={UNREACHABLE_URL}")
        async with pools_process(files[0], *places) as disagg, pools_process(files[1], *both) as agg:
            yield Running(disagg, agg, whole, session)


async def test_the_text_is_that_of_one_worker_and_nothing_is_prefilled_twice_though_a_pool_is_gone(
    running: Running,
) -> None:
    places = (("prefill", "pre"), ("decode", "dec"), ("decode", "gone"))
    before = [await running.attempts(*place) for place in places]
    for prompt in PROMPTS:
        headers, answer = await running.ask(running.disagg.url, "/v1/completions", {"prompt": prompt})
        assert (headers["x-prefill-pool"], headers["x-pool"]) == ("pre", "dec")
        _, expected = await running.ask(running.whole.data_url, "/v1/completions", {"prompt": prompt})
        agg, also = await running.ask(running.agg.url, "/v1/completions", {"prompt": prompt})
        assert agg["x-pool"] == "fast"
        found, wanted = json.loads(answer), json.loads(expected)
        assert found["choices"] == wanted["choices"] == json.loads(also)["choices"]
        assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]
    after = [await running.attempts(*place) for place in places]
    assert [now - then for now, then in zip(after, before, strict=True)] == [len(PROMPTS), len(PROMPTS), 0]
