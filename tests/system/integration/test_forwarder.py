"""Requests through a forwarder to an engine, on real sockets: bytes, ranks, errors, and what ends if one side goes."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kv_runtime.http.server import HttpServer
from tests.support.served import served
from tests.system.integration.broker import eventually
from tests.system.integration.engine_doubles import CHUNKS, Fault, TrtllmServeDouble, VllmDouble
from worker_agent.api.forwarder import Forwarder
from worker_agent.engines.servers.vllm import Vllm

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"hi","stream":true}'
ROUTED = b'{"kv_prompt_ids":"' + base64.b64encode(b"\x01\x00\x00\x00") + b'",' + BODY[1:]


@asynccontextmanager
async def forwarding(url: str, *, inflight: int = 8) -> AsyncIterator[tuple[Forwarder, str, aiohttp.ClientSession]]:
    """A forwarder for an engine of two ranks, its address, and a client."""
    forwarder = Forwarder(
        url, api_key="key", dp_ranks=(0, 1), rank_header=Vllm.rank_header, inflight_requests_max=inflight
    )
    async with aiohttp.ClientSession() as session:
        app = forwarder.app(token="", body_bytes_max=4096)
        server = HttpServer(app, "127.0.0.1", 0, drain_s=1.0, handler_cancellation=True)
        async with served(server) as address:
            yield forwarder, address, session


async def post(session: aiohttp.ClientSession, url: str, body: bytes = BODY, **headers: str) -> tuple[int, bytes]:
    named = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with session.post(f"{url}{PATH}", data=body, headers=named) as response:
        return response.status, await response.read()


async def test_an_answers_bytes_are_the_engines_and_the_request_is_what_the_client_wrote() -> None:
    async with VllmDouble().serving() as engine, forwarding(engine.url) as (forwarder, url, session):
        answer = await post(session, url, ROUTED, x_dp_rank="1", x_request_id="r1", authorization="Bearer routers")
        assert answer == (200, b"".join(CHUNKS))
        ((path, headers, body),) = engine.requests
        assert (path, body) == (PATH, BODY)
        assert headers["x-data-parallel-rank"] == "1"
        assert headers["authorization"] == "Bearer key"
        assert headers["x-request-id"] == "r1"
        assert "x-dp-rank" not in headers
        assert forwarder.in_flight.ended == {"ok": 1}


async def test_the_first_bytes_pass_before_the_last_are_made() -> None:
    async with (
        VllmDouble(holds_answers=True).serving() as engine,
        forwarding(engine.url) as (_, url, session),
        session.post(f"{url}{PATH}", data=BODY) as response,
    ):
        assert response.headers["x-engine"] == "double"
        assert await response.content.readany() == CHUNKS[0]
        engine.released.set()
        assert await response.read() == b"".join(CHUNKS[1:])


async def test_a_client_that_goes_ends_the_engines_request() -> None:
    async with VllmDouble(holds_answers=True).serving() as engine, forwarding(engine.url) as (forwarder, url, session):
        response = await session.post(f"{url}{PATH}", data=BODY)
        await response.content.readany()
        response.close()
        async with asyncio.timeout(10):
            await engine.cancelled.wait()
        await eventually(lambda: forwarder.in_flight.ended == {"cancelled": 1})
        assert forwarder.in_flight.running == 0


async def test_an_engine_that_cuts_its_answer_cuts_ours() -> None:
    async with VllmDouble().serving() as engine, forwarding(engine.url) as (forwarder, url, session):
        engine.faults[PATH] = Fault(body=b"half", cuts=True)
        with pytest.raises(aiohttp.ClientError):
            await post(session, url)
        assert forwarder.in_flight.ended == {"cut": 1}


async def test_an_engine_that_is_gone_is_a_502_and_one_that_is_silent_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone_url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with forwarding(gone_url) as (forwarder, url, session):
        status, body = await post(session, url)
        assert (status, b"engine_unreachable" in body) == (502, True)
        assert forwarder.in_flight.ended == {"failed": 1}
    monkeypatch.setattr("worker_agent.api.forwarder.SILENCE_S", 0.1)
    async with VllmDouble().serving() as engine, forwarding(engine.url) as (_, url, session):
        engine.faults[PATH] = Fault(hangs=True)
        assert (await post(session, url))[0] == 504


async def test_the_engines_own_errors_pass_as_they_are() -> None:
    async with TrtllmServeDouble().serving() as engine, forwarding(engine.url) as (_, url, session):
        status, body = await post(session, url, b'{"model":"m","prompt":"hi","nonsense":1}')
        assert (status, b"Extra inputs are not permitted" in body) == (400, True)
        assert (await post(session, url, ROUTED))[0] == 200
        engine.faults[PATH] = Fault(status=503, body=b"busy")
        assert await post(session, url) == (503, b"busy")


@pytest.mark.parametrize("rank", ["2", "-1", "x", "99999"])
async def test_a_rank_that_the_engine_does_not_have_is_refused(rank: str) -> None:
    async with VllmDouble().serving() as engine, forwarding(engine.url) as (forwarder, url, session):
        status, body = await post(session, url, x_dp_rank=rank)
        assert (status, b"allowed one of (0, 1)" in body) == (400, True)
        assert (engine.requests, forwarder.in_flight.ended) == ([], {"refused": 1})


async def test_bodies_and_requests_in_flight_have_a_bound() -> None:
    async with (
        VllmDouble(holds_answers=True).serving() as engine,
        forwarding(engine.url, inflight=1) as (forwarder, url, session),
    ):
        assert (await post(session, url, b" " * 5000))[0] == 413
        async with session.post(f"{url}{PATH}", data=BODY) as held:
            await held.content.readany()
            async with session.post(f"{url}{PATH}", data=BODY) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            engine.released.set()
            await held.read()
        await eventually(lambda: forwarder.in_flight.ended == {"ok": 1, "refused": 2})
