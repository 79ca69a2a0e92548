"""What the doctor asks over HTTP, of servers that behave and of such as do not; and of a real JetStream."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, StorageType, StreamConfig

from kv_protocol.subjects import EVENTS_STREAM, FLEET_STREAM
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, openai_errors
from kv_runtime.http.hosts import HostNames
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part, run_parts
from router.doctor.facts import AddressAnswer
from router.doctor.http_client import HttpAsker, in_lanes
from router.doctor.jetstream import JetStream
from router.doctor.router_probe import RouterProbe
from router.doctor.worker_probe import WorkerProbe
from tests.system.integration.broker import Broker
from tests.unit.kv_runtime.log_client import connected
from tests.unit.router.samples import registered

TOKEN = "secret"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Here(AbstractResolver):
    """Every name is this machine, so that an address may look like one beyond loopback."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host="127.0.0.1", port=port, family=family, proto=0, flags=0)]

    async def close(self) -> None:
        """There is nothing to close."""


@asynccontextmanager
async def asked(
    routes: dict[str, Handler], *, token: str = "", timeout_s: float = 5.0
) -> AsyncIterator[tuple[HttpAsker, str]]:
    """Serve the routes at a name beyond loopback; yield a client for them, and their URL."""
    app = web.Application(middlewares=[openai_errors, require_token(token)])
    app.add_routes([web.get(path, handler) for path, handler in routes.items()])
    names = HostNames("127.0.0.1", ("far.test",))
    server = HttpServer(app, "127.0.0.1", 0, drain_s=0.1, handler_cancellation=True, hosts=names)
    stop = asyncio.Event()
    await server.start()
    async with (
        asyncio.TaskGroup() as group,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=_Here())) as session,
    ):
        group.create_task(run_parts([Part("http", server.run)], stop=stop, drain_s=5.0))
        yield HttpAsker(session, SystemClock(), timeout_s), f"http://far.test:{server.port}"
        stop.set()


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
    "/version": says({"version": "0.1.0"}),
    "/v1/policy": says({"mode": "round-robin", "temperature": 0.0}),
    "/v1/workers": says({"workers": []}),
    "/v1/index": says({"ranks": []}),
    "/metrics": says("kvrouter_queued_requests 1.0"),
}


# ---------------------------------------------------------------- HTTP


async def test_a_control_plane_that_wants_its_token_is_read_with_it_and_is_not_open() -> None:
    async with asked(PAGES, token=TOKEN) as (asker, url):
        with_token, without = RouterProbe(asker, url, TOKEN), RouterProbe(asker, url, "")
        await in_lanes([with_token.first, without.first])
    told = with_token.seen()
    assert told.control == AddressAnswer(
        url=url, is_well=False, reason="not ready: no worker is fit; w0/0: behind", version="0.1.0", is_open=False
    )
    assert (told.mode, told.reads_overlap) == ("round-robin", False)
    assert (with_token.is_token_refused, without.is_token_refused) == (False, True)
    assert without.answer.problem == "status 401 at /v1/policy, allowed a router's control plane"


async def test_addresses_beyond_loopback_that_want_no_token_are_open() -> None:
    agent = {"/health": says({"status": "ok"}), "/status": says({"status": "ok", "log": "away"})}
    async with asked({**PAGES, **agent}) as (asker, url):
        router, worker = RouterProbe(asker, url, TOKEN), WorkerProbe(asker, registered(base_url=url), TOKEN)
        await in_lanes([router.first, worker.first])
    seen = worker.seen().http
    assert router.answer.is_open
    assert seen is not None
    assert (seen.is_open, seen.is_well, seen.is_log_away) == (True, True, True)


async def test_an_engine_without_our_agent_has_its_health_alone() -> None:
    async with asked({"/health": says("")}) as (asker, url):
        worker = WorkerProbe(asker, registered(base_url=f"{url}/"), TOKEN)
        await worker.first()
        await worker.last()
    assert worker.seen().http == AddressAnswer(url=url)
    assert worker.seen().before == worker.seen().after == {}


async def test_no_answer_is_awaited_for_ever_and_no_redirect_is_followed() -> None:
    async with asked({"/never": never, "/elsewhere": elsewhere, "/health": says("ok")}, timeout_s=0.2) as (asker, url):
        silent, moved = await asker.get(f"{url}/never"), await asker.get(f"{url}/elsewhere", TOKEN)
        refused, no_url = await asker.get("http://127.0.0.1:1/health"), await asker.get("http://", TOKEN)
    assert silent.problem == "no answer within 0.2 s"
    assert (moved.problem, moved.status, moved.is_ok) == ("", 302, False)
    assert "127.0.0.1:1" in refused.problem
    assert no_url.problem
    assert TOKEN not in no_url.problem


# ---------------------------------------------------------------- JetStream


async def readers(broker: Broker, *names: str) -> None:
    """Readers are known to the server that take nothing."""
    client = Client()
    await client.connect(broker.url)
    for name in names:
        config = ConsumerConfig(durable_name=name, ack_policy=AckPolicy.NONE)
        await client.jetstream().add_consumer(EVENTS_STREAM, config)
    await client.jetstream().add_stream(
        StreamConfig(name="IN_MEMORY", subjects=["memory"], storage=StorageType.MEMORY, max_age=60)
    )
    await client.close()


async def test_streams_and_their_readers_are_as_the_server_has_them(broker: Broker, log: EventLog) -> None:
    for number in range(5):
        await log.publish("kv.v1.events.m.w0.0", b"x" * 100, f"{number}")
    names = [f"reader-{number}" for number in range(300)]
    await readers(broker, *names)
    asking = JetStream(log)
    events, memory = await asking.stream(EVENTS_STREAM), await asking.stream("IN_MEMORY")
    fleet, none = await asking.stream(FLEET_STREAM), await asking.stream("NO_SUCH")
    pending, of_none = await asking.pending(EVENTS_STREAM), await asking.pending("NO_SUCH")
    store_bytes, store_bytes_max = await asking.store()
    assert events is not None
    assert memory is not None
    assert fleet is not None
    assert (events.messages, events.replicas, events.storage, events.bytes_max) == (5, 1, "file", 1 << 26)
    assert 500 < events.bytes < 2000
    assert 0 <= events.newest_s <= events.oldest_s < 60
    assert events.age_max_s == 3600.0
    assert (memory.storage, memory.age_max_s, memory.bytes_max, memory.oldest_s) == ("memory", 60.0, 0, 0.0)
    assert (fleet.messages, fleet.age_max_s) == (0, 0.0)
    assert (none, of_none) == (None, {})
    assert pending == dict.fromkeys(names, 5)
    assert store_bytes >= events.bytes
    assert store_bytes_max == 0


async def test_a_server_that_does_not_answer_is_unavailable(broker: Broker) -> None:
    async with connected(broker.url, confirm_s=0.2) as connection:
        broker.freeze()
        try:
            with pytest.raises(BrokerUnavailable, match=r"STREAM\.INFO\.KV_EVENTS"):
                await JetStream(connection.log).stream(EVENTS_STREAM)
        finally:
            broker.thaw()
