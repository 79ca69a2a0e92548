"""Pools of scripted routers, and `router pools` before them, on ports that the system chose.

A `PoolRouter` says of itself what a router says (`/ready`, `/v1/models`, `/metrics`), and answers requests as its
script does. Both are looked at by the process's own reader, and so are real routers (`tests/system/e2e/test_pools.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from kv_runtime.supervise import run_parts
from router.config import RouterSettings
from router.pools.config import read_config
from router.pools.process import PoolsProcess
from router.pools.selection import Targets
from router.pools.served import Identity
from router.pools.state import PoolStatus
from tests.system.integration.broker import eventually
from tests.unit.router.upstream import Exchange, Received, Script, Upstream, answers

MODEL = "m"
OK = answers(body=b'{"choices":[]}')


class PoolRouter(Upstream):
    """A router: `script` answers requests; `ready`, `models` and `queued_requests` are what it says of itself."""

    def __init__(self, script: Script = OK) -> None:
        super().__init__(self._dispatch)
        self.answer = script
        self.ready, self.models = True, [MODEL]
        self.queued_requests = 0
        self.page = b""
        """What it shows instead of its metrics, if anything."""
        self.silent = False
        self.asked: list[Received] = []

    async def _dispatch(self, exchange: Exchange) -> None:
        request = self.received[-1]
        if self.silent:
            await exchange.until_gone()
        elif request.path == "/ready":
            said = {"ready": self.ready, "reasons": [] if self.ready else ["no worker is fit"], "notes": []}
            await exchange.answer(200 if self.ready else 503, msgspec.json.encode(said))
        elif request.path == "/v1/models":
            models = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
            await exchange.answer(body=msgspec.json.encode(models))
        elif request.path == "/metrics":
            page = f"# TYPE kvrouter_queued_requests gauge\nkvrouter_queued_requests {self.queued_requests}.0\n"
            await exchange.answer(body=self.page or page.encode(), content_type="text/plain")
        else:
            self.asked.append(request)
            await self.answer(exchange)

    @property
    def bodies(self) -> list[Any]:
        """What requests it was sent."""
        return [msgspec.json.decode(each.body) for each in self.asked]


class Pools(NamedTuple):
    """The process, and a client of it."""

    session: aiohttp.ClientSession
    process: PoolsProcess
    url: str
    control_url: str

    async def post(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(f"{self.url}{path}", data=data, headers=headers) as response:
            named = {name.lower(): value for name, value in response.headers.items()}
            return response.status, named, await response.read()

    async def get(self, path: str, *, control: bool = False) -> tuple[int, Any]:
        url = self.control_url if control else self.url
        async with self.session.get(f"{url}{path}") as response:
            body = await response.read()
            return response.status, msgspec.json.decode(body) if body[:1] in b"{[" else body.decode()

    async def metric(self, sample: str) -> float:
        """Return the value of a sample, named as it stands on the page."""
        _, page = await self.get("/metrics", control=True)
        (found,) = [line for line in page.splitlines() if line.startswith(f"{sample} ")]
        return float(found.rpartition(" ")[2])

    def fitness(self) -> dict[str, str]:
        return {name: self.status(name).fitness for name in self.process.watch.pools}

    def status(self, name: str) -> PoolStatus:
        return self.process.watch.pools[name].status


@asynccontextmanager
async def running_pools(
    config: dict[str, Any],
    routers: Mapping[str, PoolRouter | list[PoolRouter]],
    *,
    defaults: Targets | None = None,
    text: str = "",
    settings: RouterSettings | None = None,
) -> AsyncIterator[Pools]:
    """Run the process before `routers`, by namespace; once all of them were looked at."""
    own = {"look_period_s": 0.02, "look_timeout_s": 5.0} | config.get("pools", {})
    replicas = {name: each if isinstance(each, list) else [each] for name, each in routers.items()}
    own["namespaces"] = {
        name: {"routers": [{"url": one.base_url, "control_url": one.base_url} for one in each]}
        for name, each in replicas.items()
    }
    read = read_config({**config, "pools": own})
    quick = {"first_byte_s": 20}
    tree = settings or RouterSettings.model_validate(
        {"data": {"port": 0, "drain_s": 2}, "control": {"port": 0}, "failures": quick}
    )
    identity = Identity(models=(MODEL,), defaults=defaults or Targets())
    process, stop = PoolsProcess(read, identity, tree, text), asyncio.Event()
    await process.start()
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
        group.create_task(run_parts(process.parts(), stop=stop, drain_s=process.drain_s))
        try:
            pools = process.watch.pools.values()
            await eventually(lambda: all(each.status.queued_requests is not None for each in pools))
            yield Pools(
                session, process, f"http://127.0.0.1:{process.data.port}", f"http://127.0.0.1:{process.control.port}"
            )
        finally:
            stop.set()


def agg(*priorities: int, retry: bool = True, **more: Any) -> dict[str, Any]:
    """Return pools `p0`, `p1`, ... of which the TTFT target's whole seconds choose one."""
    count = len(priorities)
    return {
        "mode": "agg",
        "enable_priority_retry": retry,
        "num_agg_pools": count,
        "agg_pool_dynamo_namespaces": [f"p{each}" for each in range(count)],
        "agg_pool_priorities": list(priorities),
        "agg_pool_selection_strategy": {
            "ttft_min_ms": 0, "ttft_max_ms": 1000 * count, "ttft_resolution": count,
            "itl_min_ms": 0, "itl_max_ms": 100, "itl_resolution": 1,
            "agg_pool_mapping": [[each] for each in range(count)],
        },
        **more,
    }  # fmt: skip


def disagg(prefill: int = 1, decode: int = 1) -> dict[str, Any]:
    """Return pools `pre0`, ... and `dec0`, ...; 99 tokens or less are for the first of each phase, others the last."""

    def mapping(count: int) -> list[list[int]]:
        return [[0], [count - 1]]

    return {
        "enable_priority_retry": True,
        "num_prefill_pools": prefill,
        "num_decode_pools": decode,
        "prefill_pool_dynamo_namespaces": [f"pre{each}" for each in range(prefill)],
        "decode_pool_dynamo_namespaces": [f"dec{each}" for each in range(decode)],
        "prefill_pool_selection_strategy": {
            "isl_min": 0, "isl_max": 200, "isl_resolution": 2, "ttft_min_ms": 0, "ttft_max_ms": 1000,
            "ttft_resolution": 1, "prefill_pool_mapping": mapping(prefill),
        },
        "decode_pool_selection_strategy": {
            "context_length_min": 0, "context_length_max": 200, "context_length_resolution": 2,
            "itl_min_ms": 0, "itl_max_ms": 100, "itl_resolution": 1, "decode_pool_mapping": mapping(decode),
        },
    }  # fmt: skip


def request(seconds: float | None = None, **more: Any) -> dict[str, Any]:
    """Return a request for the pool of that many seconds, in the middle of its cell."""
    targets = {} if seconds is None else {"nvext": {"router": {"ttft_target": 1000 * seconds + 500}}}
    return {"model": MODEL, "prompt": "hello", "max_tokens": 8} | targets | more
