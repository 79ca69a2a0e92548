"""`router doctor` on fleets of real processes: one that is well, and one in which everything is wrong at once."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from kv_protocol import fleet as fleet_events
from kv_protocol import subjects
from kv_protocol.fleet import WorkerLeft
from kv_runtime.event_log import EventLog
from tests.support.forked import Ended
from tests.system.e2e.client import Client
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.planted import UNREACHABLE_URL, Planted, beating, http_of_a_worker, in_the_fleet, told
from tests.system.e2e.typed import typed

pytestmark = pytest.mark.slow

TOKEN, WORKER_TOKEN = "a-secret-of-the-control-plane", "a-secret-of-the-workers"


def by_id(doctor: Ended) -> dict[str, list[str]]:
    """Return what each kind of finding is about."""
    found: dict[str, list[str]] = {}
    for each in doctor.json["findings"]:
        found.setdefault(each["id"], []).append(each["of"])
    return found


async def doctor(*arguments: str, **variables: str) -> Ended:
    return await typed("-m", "router", "doctor", *arguments, **variables)


def at(running: FleetProcesses) -> tuple[str, ...]:
    return "--nats-url", running.nats_url, "--router", running.control_url, "--data", running.data_url


# ---------------------------------------------------------------- a fleet that is well


@pytest.mark.asyncio(loop_scope="module")
async def test_in_a_fleet_that_is_well_nothing_is_found(fleet: FleetProcesses, client: Client) -> None:
    await client.complete(list(range(200)))
    words, told_ = await asyncio.gather(doctor(*at(fleet)), doctor(*at(fleet), "--json"))
    assert (words.code, told_.code) == (0, 0), words.out + words.err + told_.out
    assert by_id(told_) == {}
    assert told_.json["looked_at"] == {"workers": 2, "ranks": 2, "routers": 1}
    assert told_.json["exit_code"] == 0
    assert words.out.startswith("0 errors, 0 warnings; looked at 2 workers, 2 ranks, 1 router, for ")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_reached_is_an_error_while_the_other_half_answers(fleet: FleetProcesses) -> None:
    without_router, without_log = await asyncio.gather(
        doctor("--nats-url", fleet.nats_url, "--router", UNREACHABLE_URL, "--json"),
        doctor("--nats-url", "nats://127.0.0.1:1", "--router", fleet.control_url, "--json"),
    )
    assert (without_router.code, by_id(without_router)["router.not_ready"]) == (2, [UNREACHABLE_URL])
    assert (without_log.code, [*by_id(without_log)]) == (2, ["log.unreachable"])
    assert without_log.json["looked_at"]["workers"] == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_where_nothing_can_be_seen_it_says_so_and_why(fleet: FleetProcesses) -> None:
    nothing, no_time, no_url, with_user, no_token = await asyncio.gather(
        doctor("--nats-url", "nats://127.0.0.1:1", "--router", UNREACHABLE_URL),
        doctor("--listen", "0"),
        doctor("--router", "127.0.0.1:8001"),
        doctor("--data", "http://me:secret@127.0.0.1:8000"),
        doctor(*at(fleet), "--token", "two\nlines"),
    )
    assert [each.code for each in (nothing, no_time, no_url, with_user, no_token)] == [3] * 5
    assert "nats.url nats://127.0.0.1:1" in nothing.err
    assert f"--router {UNREACHABLE_URL}: " in nothing.err
    assert "'--listen': 0.0 is not in the range 1.5<=x<=600." in no_time.err
    assert "--router: found '127.0.0.1:8001', allowed http(s)://host:port" in no_url.err
    assert "--data: found an address with a user, allowed http(s)://host:port" in with_user.err
    assert "secret" not in with_user.err
    assert "control.token: allowed text without control characters" in no_token.err
    assert "lines" not in no_token.err


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_without_workers_is_seen_with_its_token_only() -> None:
    settings = ("nats.port=0", "data.port=0", "control.port=0", f"control.token={TOKEN}")
    command = [sys.executable, "-m", "router", *(word for each in settings for word in ("--set", each))]
    async with asyncio.TaskGroup() as group:
        router = ChildProcess("router", command)
        await router.start(group)
        try:
            control_url = (await router.line_with("control plane")).split()[2]
            nats_url = (await router.line_with("event log")).split()[2]
            where = ("--nats-url", nats_url, "--router", control_url)
            none, wrong, right = await asyncio.gather(
                doctor(*where), doctor(*where, "--token", "another"), doctor(*where, "--token", TOKEN, "--json")
            )
        finally:
            await router.end()
    allowed = f"router: --token: found none or another at {control_url}, allowed its control.token\n"
    assert [(each.code, each.out, each.err) for each in (none, wrong)] == [(3, "", allowed)] * 2
    assert (right.code, sorted(by_id(right))) == (2, ["fleet.empty", "router.not_ready"])
    assert TOKEN not in right.out + right.err


# ---------------------------------------------------------------- a fleet in which everything is wrong


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ill() -> AsyncIterator[FleetProcesses]:
    """Two workers and a router."""
    worker = (*FAST_WORKER, "engine.total_kv_blocks=400")
    shape = FleetShape(workers=2, worker_settings=worker, router_settings=QUIET_ROUTER)
    async with FleetProcesses(shape) as running:
        yield running


def planted(well_url: str, ill_url: str) -> list[Planted]:
    pair: dict[str, Any] = {"model": "pair", "max_seq_len": 4096}
    twice = told("twice", f"{well_url}/t")
    return [
        beating(told("here", well_url)),
        beating(told("also-here", well_url)),
        beating(told("ill", ill_url)),
        beating(told("gone-home", f"{well_url}/g")),
        beating(told("unreachable", UNREACHABLE_URL, block_size=32, event_source="none")),
        beating(told("hashes-otherwise", f"{well_url}/a", canary=1)),
        beating(told("untold", f"{well_url}/b", template_digest="other"), used_blocks=500),
        Planted(told("silent", f"{well_url}/c"), ()),
        Planted(told("half", f"{well_url}/d", dp_ranks=(0, 1)), (("half-1", 7, 0),)),
        Planted(twice, ((twice.instance, 7, 0), ("twice-2", 9, 0))),
        beating(told("p", f"{well_url}/f", role="prefill", kv_cache_dtype="fp8", transfer_buffer_tokens=64, **pair)),
        beating(told("q", f"{well_url}/g", role="prefill", transfer_domain="far", **pair)),
        beating(told("d", f"{well_url}/h", role="decode", kv_cache_dtype="bf16", **pair)),
        beating(told("lonely", f"{well_url}/i", role="prefill", model="lonely")),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_planted_fault_is_found(ill: FleetProcesses) -> None:
    await ill.kill("w1")
    log = await EventLog.connect(ill.nats_url, name="planted")
    async with (
        http_of_a_worker() as well_url,
        http_of_a_worker(ill="the engine died") as ill_url,
        in_the_fleet(log, planted(well_url, ill_url)),
    ):
        left = WorkerLeft(worker_id="gone-home", instance="gone-home-1", reason="its /health does not answer")
        await log.publish(subjects.fleet("planted", "gone-home"), fleet_events.encode(left))
        await open_a_breaker(ill)
        secrets = {"KVROUTER_CONTROL__TOKEN": TOKEN, "KVROUTER_DATA__WORKER_TOKEN": WORKER_TOKEN}
        looked = await doctor(*at(ill), "--json", **secrets)
    await log.close()
    assert looked.code == 2, looked.err
    found = by_id(looked)
    for check, of in {
        "worker.silent": ["half", "silent", "w1"],
        "worker.unhealthy": ["ill", "unreachable"],
        "worker.withdrawn": ["gone-home"],
        "worker.doubled": ["here, also-here", "twice/0"],
        "parity.hashes": ["hashes-otherwise", "planted"],
        "parity.tokens": ["lonely", "lonely", "pair", "pair", "planted", "planted"],
        "events.none": ["unreachable", "untold/0"],
        "pair.transfer": ["p", "pair"],
        "pair.alone": ["q"],
        "fleet.empty": ["lonely"],
        "breaker.open": ["unreachable/0"],
    }.items():
        assert sorted(found.get(check, [])) == sorted(of), (check, found)
    assert TOKEN not in looked.out + looked.err
    assert WORKER_TOKEN not in looked.out + looked.err


async def open_a_breaker(running: FleetProcesses) -> None:
    """The router has tried the worker that cannot be reached."""
    body = {"model": "planted", "prompt": [1, 2, 3], "max_tokens": 1}
    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            headers = {"x-worker-instance-id": "unreachable"}
            async with session.post(f"{running.data_url}/v1/completions", json=body, headers=headers) as answer:
                if answer.status == 502 or "breaker" in await answer.text():
                    return
    raise AssertionError("the router never tried it")
