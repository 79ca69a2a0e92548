"""Clients of an aiohttp server that send no more while they wait, expect something, or name no host."""

import asyncio
import json
from collections.abc import Callable

import pytest
import uvloop
from aiohttp import web

from tests.unit.kv_runtime.test_http import BODY_BYTES_MAX, SHAPE, TOKEN, Gate, Served, application, served

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n"
CLOSE = b"Connection: close\r\n"


class ReadingGate(Gate):
    """A gate whose connection can be read again: the framework does so when a body was read."""

    transport: asyncio.Transport

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.transport = request.transport
        return await super().handle(request)

    def read_again(self) -> None:
        self.transport.pause_reading()
        self.transport.resume_reading()


async def half_closed(server: Served, sent: bytes) -> bytes:
    """Send bytes and shut down the sending side at once; return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


# ---------------------------------------------------------------- a client that sends no more


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_closes_its_sending_side_gets_all_of_its_answers(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def answers() -> bytes:
        async with served(application()) as server:
            return await half_closed(server, POST % (3, b"") + b"abc" + POST % (4, b"") + b"abcd")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        answer = runner.run(answers())
    assert answer.count(CONTINUE) <= 2, "one before each answer"
    statuses = [each[:3] for each in answer.replace(CONTINUE, b"").split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200"]
    assert answer.index(b'{"bytes":3}') < answer.index(b'{"bytes":4}')


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_closes_its_sending_side_while_its_request_is_served_gets_the_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def interim_and_answer() -> tuple[bytes, bytes]:
        gate = ReadingGate()
        async with served(application(gate=gate), handler_cancellation=True) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(GET % b"/v1/gate")
            writer.write_eof()
            await gate.entered.wait()
            interim = await reader.readexactly(len(CONTINUE))
            gate.read_again()
            assert (await server.get("/metrics"))[0] == 200, "the end of what the client sends was read again"
            gate.may_leave.set()
            answer = await reader.read()
            writer.close()
            return interim, answer

    with asyncio.Runner(loop_factory=new_loop) as runner:
        interim, answer = runner.run(interim_and_answer())
    assert interim == CONTINUE
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"done":true}')


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_the_handler_of_a_client_that_is_gone_is_cancelled(how: str) -> None:
    gate = Gate()
    async with served(application(gate=gate), handler_cancellation=True) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET % b"/v1/gate")
        await gate.entered.wait()
        if how == "reset":
            writer.transport.abort()
        else:
            writer.close()
        async with asyncio.timeout(5):
            while not gate.cancelled:  # noqa: ASYNC110 - a flag has no event
                await asyncio.sleep(0)


async def test_a_client_of_http_1_0_that_closes_its_sending_side_in_one_go_gets_its_answer() -> None:
    async with served(application()) as server:
        answer = await half_closed(server, b"POST /v1/echo HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert CONTINUE not in answer


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_another_version_of_http_is_refused_and_its_connection_ends(version: bytes) -> None:
    async with served(application()) as server:
        answer = await half_closed(server, (GET % b"/v1/echo").replace(b"1.1", version))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 505 ")
    assert (
        json.loads(body)["error"]["message"] == f"version: found HTTP/{version.decode()}, allowed HTTP/1.1 and HTTP/1.0"
    )


async def test_a_client_that_closes_its_sending_side_within_the_body_gets_400() -> None:
    async with served(application()) as server:
        answer = await half_closed(server, POST % (10, b"") + b"abc")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"body: found a part of it, allowed all of it" in answer


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: lo"])
async def test_a_client_that_closes_its_sending_side_without_a_request_gets_nothing(sent: bytes) -> None:
    async with served(application()) as server:
        assert await half_closed(server, sent) == b""


# ---------------------------------------------------------------- Expect


async def test_a_body_that_is_expected_is_asked_for() -> None:
    async with served(application()) as server:
        answer = await server.raw(POST % (3, b"Expect: 100-Continue\r\n" + CLOSE) + b"abc")
    assert answer.startswith(CONTINUE + b"HTTP/1.1 200 ")


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with served(application()) as server:
        head, _, body = (await server.raw(POST % (1 << 40, b"Expect: 100-continue\r\n"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"aiohttp" not in head
    error = json.loads(body)["error"]
    assert error["message"] == f"body: found {1 << 40} bytes, allowed {BODY_BYTES_MAX}"
    assert error["code"] == "body_too_large"


async def test_an_unknown_expectation_gets_an_openai_error() -> None:
    async with served(application()) as server:
        head, _, body = (await server.raw(POST % (3, b"Expect: tea\r\n") + b"abc")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 417 ")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == SHAPE
    assert (error["message"], error["param"]) == ("expect: found 'tea', allowed 100-continue", "Expect")


# ---------------------------------------------------------------- Host


@pytest.mark.parametrize("path", [b"/nowhere", b"/metrics"])
@pytest.mark.parametrize(
    ("host", "status", "message"),
    [
        (b"Host:\r\n", 421, "host: found '', allowed host or host:port"),
        (b"", 400, None),
        (b"Host: localhost\r\nHost: localhost\r\n", 400, None),
    ],
)
async def test_a_request_names_its_host_once(host: bytes, path: bytes, status: int, message: str | None) -> None:
    async with served(application()) as server:
        head, _, body = (await server.raw(b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path, host, CLOSE))).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert int(head.split(b" ")[1]) == status
    assert message in {None, error["message"]}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /metrics HTTP/1.0\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost:\r\nAuthorization: Bearer %b\r\n%b\r\n" % (TOKEN.encode(), CLOSE),
    ],
)
async def test_http_1_0_and_the_token_need_no_host(sent: bytes) -> None:
    async with served(application(token=TOKEN)) as server:
        assert (await server.raw(sent)).split(b" ")[1] == b"200"
