"""`router pools` before real routers with simulated workers: one pool saturated, then killed: no new request fails."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from kv_runtime.clock import Clock
from tests.support.paths import ROOT
from tests.support.processes import running as running_process
from tests.system.e2e.client import MODEL
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.test_commands import run
from tests.system.integration.broker import eventually
from tests.system.integration.pool_routers import agg

CLIENTS = 24
REQUESTS_AFTER_THE_KILL = 4
WAIT_S = 60.0
NARROW_WORKER = ("engine.block_size=16", "engine.speed=4", "engine.max_num_seqs=2", "telemetry.log_level=error")
CONFIG = {
    **agg(0, 1),
    "agg_pool_dynamo_namespaces": ["fast", "slow"],
    "pools": {"queue_requests_max": 4, "look_period_s": 0.1, "ttft_bound_ms": 60_000, "window_requests_min": 1},
}


class PoolsProcess(NamedTuple):
    """The process, and its addresses."""

    process: ChildProcess
    url: str
    control_url: str


@asynccontextmanager
async def pools_process(config: Path, *arguments: str) -> AsyncIterator[PoolsProcess]:
    command = [sys.executable, "-m", "router", "pools", "--config", str(config), "--model-name", MODEL]
    started = ChildProcess("pools", [*command, "--port", "0", "--control-port", "0", *arguments])
    async with running_process(started) as process:
        url = (await process.line_with("pools on")).split()[2]
        yield PoolsProcess(process, url, (await process.line_with("control plane")).split()[2])


class Seen(NamedTuple):
    """One streamed request as its client saw it; `began_s` is the monotonic clock's."""

    began_s: float
    status: int
    pool: str
    text: bytes
    done: bool


class PoolsClient(NamedTuple):
    """What tests ask of the process."""

    pools: PoolsProcess
    session: aiohttp.ClientSession

    async def status(self, namespace: str) -> dict[str, Any]:
        async with self.session.get(f"{self.pools.control_url}/v1/pools") as response:
            (group,) = (await response.json())["groups"]
        found: dict[str, Any] = next(each for each in group["pools"] if each["namespace"] == namespace)
        return found

    async def until(self, namespace: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Return once the pool stands so: in another process there is nothing to wait on."""
        async with asyncio.timeout(WAIT_S):
            while not holds(await self.status(namespace)):
                await Clock().sleep(0.05)

    async def stream(self, prompt: str, ttft_ms: float) -> Seen:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "stream": True}
        began_s = time.monotonic()
        asked = body | {"nvext": {"router": {"ttft_target": ttft_ms}}}
        async with self.session.post(f"{self.pools.url}/v1/completions", json=asked) as response:
            text = await response.read()
            done = text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text
            return Seen(began_s, response.status, response.headers.get("x-pool", ""), text, done)


class Running(NamedTuple):
    """Two pools, and a client of the process before them."""

    fast: FleetProcesses
    slow: FleetProcesses
    client: PoolsClient


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    file = tmp_path_factory.mktemp("pools") / "pools.json"
    file.write_text(json.dumps(CONFIG))
    narrow = FleetShape(workers=1, worker_settings=NARROW_WORKER, router_settings=QUIET_ROUTER)
    wide = FleetShape(workers=1, worker_settings=FAST_WORKER, router_settings=QUIET_ROUTER)
    async with FleetProcesses(narrow) as fast, FleetProcesses(wide) as slow, aiohttp.ClientSession() as session:
        places = [
            f"--pool={name}={each.data_url},{each.control_url}" for name, each in (("fast", fast), ("slow", slow))
        ]
        async with pools_process(file, *places) as pools:
            yield Running(fast, slow, PoolsClient(pools, session))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pool_that_is_saturated_and_then_killed_costs_no_new_request(running: Running) -> None:
    seen: list[Seen] = []
    killed_at_s = float("inf")

    async def talk(number: int) -> None:
        after = 0
        while after < REQUESTS_AFTER_THE_KILL:
            one = await running.client.stream(f"person {number} says {len(seen)} " + "words " * 30, 0)
            seen.append(one)
            after += one.began_s > killed_at_s

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(talk(number))
        await running.client.until("fast", lambda found: found["causes"] == ["queue"])
        strained_at_s = time.monotonic()
        await eventually(lambda: any(one.began_s > strained_at_s and one.pool == "slow" for one in seen))
        killed_at_s = time.monotonic()
        await running.fast.router.end(signal.SIGKILL)
    assert "fast" in {one.pool for one in seen if one.began_s < strained_at_s}
    late = [one for one in seen if one.began_s > killed_at_s]
    assert len(late) >= CLIENTS * REQUESTS_AFTER_THE_KILL
    assert all(one.status == 200 and one.done and one.pool == "slow" for one in late), late
    assert all(one.status == 200 for one in seen), "no request was refused before, either"
    assert all(one.done or one.pool == "fast" for one in seen), "only what the dead router had begun is lost"
    await running.client.until("fast", lambda found: found["fitness"] == "down")


@pytest.mark.asyncio(loop_scope="module")
async def test_routers_may_run_in_the_same_process(tmp_path: Path) -> None:
    file, tree = tmp_path / "pools.json", tmp_path / "fast.yaml"
    file.write_text(json.dumps(CONFIG))
    tree.write_text("{nats: {port: 0}, data: {port: 0}, control: {port: 0}, telemetry: {log_level: warning}}\n")
    other = tmp_path / "slow.yaml"
    other.write_text(tree.read_text())
    async with pools_process(file, f"--pool=fast={tree}", f"--pool=slow={other}") as pools:
        log_url = (await pools.process.line_with(f"router of {tree}")).split()[-1]
        command = [sys.executable, "-m", "worker_agent", "serve", "--worker-id", "w0", "--nats-url", log_url]
        settings = [part for setting in FAST_WORKER for part in ("--set", setting)]
        worker = ChildProcess("w0", [*command, "--model", MODEL, *settings])
        async with running_process(worker), aiohttp.ClientSession() as session:
            client = PoolsClient(pools, session)
            await client.until("fast", lambda found: found["fitness"] == "fit" and found["queued_requests"] == 0)
            await client.until("slow", lambda found: found["fitness"] == "down")
            for ttft_ms in (0.0, 1900.0):
                one = await client.stream("hello", ttft_ms)
                assert (one.status, one.pool, one.done) == (200, "fast", True)


def test_flags_are_read_from_the_peers_variables_by_their_old_names_too() -> None:
    file = ROOT / "configs" / "pools" / "live-agg.json"
    for target, code, out, err in (
        ("90", 0, f"{file}: agg, fast, slow\n", ""),
        ("-1", 2, "", "-1.0 is not in the range"),
    ):
        ended = run(
            "router", "pools", "--check", DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET=target,
            DYN_GLOBAL_ROUTER_CONFIG=str(file), DYN_GLOBAL_ROUTER_MODEL_NAME="m",
        )  # fmt: skip
        assert (ended.code, ended.out) == (code, out)
        assert err in ended.err
