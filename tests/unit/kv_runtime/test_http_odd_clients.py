"""Clients of an aiohttp server that are gone, speak another HTTP, expect something, or name no host."""

import asyncio
import json

import pytest

from tests.unit.kv_runtime.test_http import BODY_BYTES_MAX, SHAPE, TOKEN, Gate, Served, application, served

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n"
CLOSE = b"Connection: close\r\n"


async def answered(server: Served, sent: bytes) -> bytes:
    """Send bytes; return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return answer


# ---------------------------------------------------------------- a client that is gone, or speaks another HTTP


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


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_another_version_of_http_is_refused_and_its_connection_ends(version: bytes) -> None:
    async with served(application()) as server:
        answer = await answered(server, (GET % b"/v1/echo").replace(b"1.1", version))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 505 ")
    assert (
        json.loads(body)["error"]["message"] == f"version: found HTTP/{version.decode()}, allowed HTTP/1.1 and HTTP/1.0"
    )


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
