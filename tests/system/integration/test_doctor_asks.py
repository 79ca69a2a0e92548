"""What the doctor asks over HTTP, of servers that behave and of such as do not; and what it has of a real log."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kv_protocol import fleet, subjects
from kv_protocol.fleet import Heartbeat, WorkerLeft
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.load import LoadReport, encode_load
from kv_protocol.subjects import EVENTS_STREAM
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, openai_errors
from kv_runtime.http.server import HttpServer
from router.doctor.facts import AddressAnswer, FleetFacts
from router.doctor.pages import HttpAsker, PageUnreadable, in_lanes
from router.doctor.survey import LogWatch, RouterProbe, fills, worker_seen
from tests.support.served import served
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import connected
from tests.unit.router.samples import MODEL, rank, registered

TOKEN = "secret"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def asked(
    routes: dict[str, Handler], *, token: str = "", timeout_s: float = 5.0
) -> AsyncIterator[tuple[HttpAsker, str]]:
    """Serve the routes; yield a client for them, and their URL."""
    app = web.Application(middlewares=[openai_errors, require_token(token)])
    app.add_routes([web.get(path, handler) for path, handler in routes.items()])
    server = HttpServer(app, "127.0.0.1", 0, drain_s=0.1, handler_cancellation=True)
    async with served(server), aiohttp.ClientSession() as session:
        yield HttpAsker(session, timeout_s), f"http://127.0.0.1:{server.port}"


def says(value: object, status: int = 200) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return json_response(value, status)

    return answer


async def never(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("/health")


PAGES: dict[str, Handler] = {
    "/ready": says({"ready": False, "reasons": ["no worker is fit", "w0/0: behind"]}, 503),
    "/v1/policy": says({"mode": "round-robin", "temperature": 0.0}),
    "/v1/workers": says({"workers": []}),
}


# ---------------------------------------------------------------- HTTP


async def test_a_control_plane_that_wants_its_token_is_read_with_it() -> None:
    async with asked(PAGES, token=TOKEN) as (asker, url):
        with_token, without = RouterProbe(asker, url, TOKEN), RouterProbe(asker, url, "")
        await in_lanes([with_token.first, without.first])
    told = with_token.seen
    assert told.control == AddressAnswer(url=url, reason="not ready: no worker is fit; w0/0: behind")
    assert (told.mode, told.reads_overlap) == ("round-robin", False)
    assert (with_token.is_token_refused, without.is_token_refused) == (False, True)
    assert without.seen.control.problem == "status 401 at /v1/policy, allowed a router's control plane"


async def test_an_engine_without_our_agent_has_its_health_alone() -> None:
    async with asked({"/health": says("")}) as (asker, url):
        worker = await worker_seen(asker, registered(base_url=f"{url}/"))
    assert worker.http == AddressAnswer(url=url)


async def test_a_worker_that_is_ill_says_why() -> None:
    async with asked({"/health": says({"status": "failed", "reason": "the engine died"}, 503)}) as (asker, url):
        worker = await worker_seen(asker, registered(base_url=url))
    assert worker.http == AddressAnswer(url=url, reason="the engine died")


async def test_no_answer_is_awaited_for_ever_and_no_redirect_is_followed() -> None:
    async with asked({"/never": never, "/elsewhere": elsewhere, "/health": says("ok")}, timeout_s=0.2) as (asker, url):
        asked_of = (f"{url}/never", f"{url}/elsewhere", "http://127.0.0.1:1/health", "http://")
        silent, moved, refused, no_url = [await refusal(asker, each) for each in asked_of]
    assert str(silent) == "no answer within 0.2 s"
    assert (str(moved), moved.status) == ("status 302", 302)
    assert "127.0.0.1:1" in str(refused)
    assert str(no_url)
    assert TOKEN not in str(no_url)


async def refusal(asker: HttpAsker, url: str) -> PageUnreadable:
    with pytest.raises(PageUnreadable) as raised:
        await asker.get(url, TOKEN)
    return raised.value


# ---------------------------------------------------------------- the log


async def test_of_the_log_it_has_the_newest_of_each_worker_every_head_the_highest_load_and_what_is_unreadable(
    log: EventLog,
) -> None:
    facts = FleetFacts()
    watch = LogWatch(facts, Clock(), FleetGate())
    await watch.start(log)
    here, gone = registered("w0", dp_ranks=(0, 1)), WorkerLeft(worker_id="w1", instance="w1-1", reason="ill")
    told: dict[str, fleet.FleetEvent] = {"w0": here, "w1": gone}
    for worker_id, events in {"w0": (here,), "w1": (registered("w1"), gone)}.items():
        for event in events:
            await log.publish(subjects.fleet(MODEL, worker_id), fleet.encode(event))
    await log.publish(subjects.fleet(MODEL, "garbage"), b"{")
    for rank_name, instance, epoch, stale in (("w0/0", "w0-1", 7, ""), ("w0/0", "w0-2", 9, "behind")):
        beat = Heartbeat(instance=instance, epoch=epoch, last_seq=3, stale=stale)
        await log.announce(subjects.heartbeat(MODEL, rank(rank_name)), fleet.encode(beat))
    for used_blocks in (500, 20):
        report = LoadReport(
            instance="w0-1",
            iteration=1,
            running_requests=0,
            waiting_requests=0,
            used_blocks=used_blocks,
            total_blocks=999,
        )
        await log.announce(subjects.load(MODEL, rank("w0/1")), encode_load(report))
    await watch.read_fleet(5.0)
    await eventually(lambda: bool(facts.refused) and len(facts.heads) == 2 and bool(facts.used_blocks))
    assert watch.events == {subjects.fleet(MODEL, worker_id): event for worker_id, event in told.items()}
    assert [(each.rank, each.instance, each.epoch, each.last_seq, each.stale) for each in facts.heads] == [
        (rank("w0/0"), "w0-1", 7, 3, ""),
        (rank("w0/0"), "w0-2", 9, 3, "behind"),
    ]
    assert facts.used_blocks == {rank("w0/1"): 500}
    assert facts.refused.startswith(subjects.fleet(MODEL, "garbage"))


async def test_the_log_s_size_is_as_the_server_has_it(log: EventLog) -> None:
    for number in range(5):
        await log.publish("kv.v1.events.m.w0.0", b"x" * 100, f"{number}")
    found = await fills(log)
    assert found[EVENTS_STREAM][1] == 1 << 26
    assert 500 < found[EVENTS_STREAM][0] < 2000
    assert found["the store"][0] >= found[EVENTS_STREAM][0]
    assert found["the store"][1] <= 0


async def test_a_server_that_does_not_answer_is_unavailable(broker: Broker) -> None:
    async with connected(broker.url, confirm_s=0.2) as log:
        broker.freeze()
        try:
            with pytest.raises(BrokerUnavailable, match="INFO"):
                await fills(log)
        finally:
            broker.thaw()
