"""Connections of an aiohttp server: their bound, and clients that are gone, are slow, or send what is no request."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from kv_runtime.files import RESERVED, OpenFiles
from kv_runtime.http import server as server_module
from kv_runtime.http.server import CONNECTIONS_MAX, CONNECTIONS_MIN, HttpServer, connections_bound
from tests.support.descriptors import no_descriptors_left
from tests.unit.kv_runtime.http_server import BODY_BYTES_MAX, SHAPE, TOKEN, Gate, Served, application, served

BOUND = 2
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


LARGE_BYTES = 32 << 20
"""More than the system keeps for a client that does not read."""


async def large(_: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(LARGE_BYTES))


class Client:
    """Connections to one server."""

    def __init__(self, server: HttpServer, open_connections: AsyncExitStack) -> None:
        self.server, self._open = server, open_connections

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection that the server has accepted or is about to accept."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self._open.callback(writer.close)
        return reader, writer

    async def metrics(self) -> dict[str, float]:
        """Return the samples of the server's connections; the connection that reads them is one of them."""
        reader, writer = await self.dial()
        writer.write((GET % b"/metrics").replace(b"Host", b"Connection: close\r\nHost"))
        text = (await reader.read()).decode()
        return {name: float(value) for name, value in re.findall(r"^kvrouter_server_(\S+) (\S+)$", text, re.MULTILINE)}


@asynccontextmanager
async def running(gate: Gate | None = None, connections_max: int = BOUND) -> AsyncIterator[Client]:
    """Run a server of at most `connections_max` connections."""
    app = application(gate=gate)
    app.router.add_get("/large", large)
    server = HttpServer(app, "127.0.0.1", 0, connections_max=connections_max)
    stop = asyncio.Event()
    await server.start()
    async with asyncio.TaskGroup() as group, AsyncExitStack() as open_connections:
        group.create_task(server.run(stop))
        open_connections.callback(stop.set)
        if gate is not None:
            open_connections.callback(gate.may_leave.set)
        yield Client(server, open_connections)


async def answered(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers by name in lower case, and body."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return int(lines[0].split(" ")[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(0, CONNECTIONS_MIN), (RESERVED + 20, CONNECTIONS_MIN), (RESERVED + 220, 100), (1 << 20, CONNECTIONS_MAX)],
)
def test_the_bound_is_half_of_the_files_that_are_free(allowed: int, expected: int) -> None:
    assert connections_bound(CONNECTIONS_MAX, OpenFiles(used=20, allowed=allowed)) == expected


async def test_the_bound_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "open_files", lambda: OpenFiles(used=20, allowed=20 + RESERVED))
    async with running(connections_max=CONNECTIONS_MAX) as client:
        assert (await client.metrics())["connections_max"] == CONNECTIONS_MIN


async def test_at_the_bound_the_connection_that_is_idle_longest_makes_room() -> None:
    with capture_logs() as logs:
        async with running() as client:
            idle, _ = await client.dial()
            kept, writer = await client.dial()
            writer.write(GET % b"/nowhere")
            assert (await answered(kept))[0] == 404
            samples = await client.metrics()
            assert await idle.read() == b"", "closed to make room for the connection that read the metrics"
            writer.write(GET % b"/nowhere")
            assert (await answered(kept))[0] == 404, "this connection was used later"
    assert samples['connections{state="in_use"}'] == 1
    assert samples['connections{state="idle"}'] == 1
    assert samples['connections_at_bound_total{outcome="idle_closed"}'] == 1
    assert samples['connections_at_bound_total{outcome="refused"}'] == 0
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("connections_bound_reached", "warning")
    assert (line["outcome"], line["connections_max"]) == ("idle_closed", BOUND)


async def test_at_the_bound_a_connection_with_a_head_that_does_not_end_makes_room() -> None:
    async with running() as client:
        for _ in range(3 * BOUND):
            _, writer = await client.dial()
            writer.write(b"GET /nowhere HTTP/1.1\r\nHost: lo")
        reader, writer = await client.dial()
        writer.write(GET % b"/nowhere")
        assert (await answered(reader))[0] == 404


async def test_while_every_connection_is_in_use_a_further_one_is_refused() -> None:
    gate = Gate()
    with capture_logs() as logs:
        async with running(gate) as client:
            served = []
            for _ in range(BOUND):
                reader, writer = await client.dial()
                writer.write(GET % b"/v1/gate")
                await gate.entered.wait()
                gate.entered.clear()
                served.append(reader)
            reader, _ = await client.dial()
            status, headers, body = await answered(reader)
            assert await reader.read() == b""
            gate.may_leave.set()
            assert [(await answered(each))[0] for each in served] == [200] * BOUND
            samples = await client.metrics()
    assert (status, headers["retry-after"], headers["content-type"]) == (503, "1", "application/json")
    assert json.loads(body)["error"]["message"] == "2 connections are open and in use; try again"
    assert samples['connections_at_bound_total{outcome="refused"}'] == 1
    assert [line["outcome"] for line in logs if line["event"] == "connections_bound_reached"][:1] == ["refused"]


async def test_a_client_that_does_not_read_its_answer_makes_room() -> None:
    async with running() as client:
        for _ in range(BOUND):
            reader, writer = await client.dial()
            writer.write(GET % b"/large")
            await reader.readexactly(1)
        for _ in range(2 * BOUND):
            reader, writer = await client.dial()
            writer.write(GET % b"/nowhere")
            assert (await answered(reader))[0] == 404


async def test_while_nothing_can_be_accepted_clients_wait_and_failures_are_counted_and_logged() -> None:
    async with running() as client:
        await client.metrics()
        late = socket.socket()
        late.setblocking(False)
        with capture_logs() as logs, no_descriptors_left():
            with pytest.raises(BlockingIOError):
                late.connect(("127.0.0.1", client.server.port))
            while not accept_failures(client.server):  # noqa: ASYNC110 - sums have no event
                await asyncio.sleep(0)
        await asyncio.get_running_loop().sock_sendall(late, GET % b"/nowhere")
        received = await asyncio.get_running_loop().sock_recv(late, 4096)
        late.close()
        samples = await client.metrics()
    assert received.startswith(b"HTTP/1.1 404 ")
    assert samples['accept_failures_total{error="EMFILE"}'] >= 1
    assert [(each["event"], each["error"]) for each in logs] == [("accept_failed", "EMFILE")]


def accept_failures(server: HttpServer) -> float:
    samples = (sample for family in server.families() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "kvrouter_server_accept_failures_total")


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
POST = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n"
CLOSE = b"Connection: close\r\n"


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


# ---------------------------------------------------------------- Expect


async def test_a_body_that_is_expected_is_asked_for(server: Served) -> None:
    answer = await server.raw(POST % (3, b"Expect: 100-Continue\r\n" + CLOSE) + b"abc")
    assert answer.startswith(CONTINUE + b"HTTP/1.1 200 ")


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server: Served) -> None:
    head, _, body = (await server.raw(POST % (1 << 40, b"Expect: 100-continue\r\n"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"aiohttp" not in head
    error = json.loads(body)["error"]
    assert error["message"] == f"body: found {1 << 40} bytes, allowed {BODY_BYTES_MAX}"
    assert error["code"] == "body_too_large"


async def test_an_unknown_expectation_gets_an_openai_error(server: Served) -> None:
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
async def test_a_request_names_its_host_once(
    server: Served, host: bytes, path: bytes, status: int, message: str | None
) -> None:
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


# ---------------------------------------------------------------- what is no request, or comes too slowly


TWO_LENGTHS = (
    b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
)


@pytest.mark.parametrize(
    "sent", [TWO_LENGTHS, b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nx y: z\r\n\r\n"]
)
async def test_what_is_no_request_gets_an_error_body_and_no_traceback_is_logged(
    server: Served, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as lines:
        answer = await server.raw(sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400"
    assert set(json.loads(body)["error"]) == SHAPE
    assert b"aiohttp" not in answer
    assert caplog.records == []
    assert [(line["event"], line["log_level"], "exc_info" in line) for line in lines] == [
        ("request_malformed", "debug", False)
    ]


@pytest.mark.parametrize("path", ["/metrics", "/v1/fail", "/nowhere"])
async def test_no_answer_says_which_software_and_version_it_is_from(server: Served, path: str) -> None:
    async with server.session.get(path) as response:
        assert "Server" not in response.headers


async def test_a_body_that_trickles_gets_408(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "BODY_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\nx")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body: found 1 bytes within 0 s, allowed 500 a second after 0.1 s, and 300 s in all" in answer
    assert b"\r\nConnection: close\r\n" in answer
    assert caplog.records == []


async def test_a_body_that_comes_at_the_least_rate_is_read(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BODY_S", 0.1)
    monkeypatch.setattr(server_module, "RATE_MIN_BYTES_S", 100.0)
    gate = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 800
        asyncio.get_running_loop().call_later(0.3, gate.set)
        await gate.wait()
        yield b"x"

    async with server.session.post("/v1/echo", data=body()) as response:
        assert await response.json() == {"bytes": 801}


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: lo"])
async def test_a_head_that_does_not_come_ends_its_connection(
    server: Served, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_runtime.http.server.HEAD_S", 0.1)
    assert await server.raw(sent) == b""


CODED = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: %b\r\nContent-Length: 1\r\n\r\nx"


@pytest.mark.parametrize(
    "coding", [b"gzip", b"GZIP", b"deflate", b"br", b"identity, gzip", b"identity\r\nContent-Encoding: gzip"]
)
@pytest.mark.parametrize(
    ("method", "path"), [(b"POST", b"/v1/echo"), (b"GET", b"/metrics"), (b"POST", b"/metrics"), (b"GET", b"/nowhere")]
)
async def test_a_coded_body_gets_415_and_is_not_decoded(
    method: bytes, path: bytes, coding: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """`x` is in no coding: a decoder would fail."""
    with capture_logs() as lines:
        async with served(application(token=TOKEN)) as server:
            answer = await server.raw(CODED % (method, path, coding))
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"content-encoding: found '%b', allowed identity" % coding.replace(b"\r\nContent-Encoding:", b",") in answer
    assert (lines, caplog.records) == ([], [])


async def test_a_body_in_the_identity_coding_is_read(server: Served) -> None:
    answer = await server.raw(
        (CODED % (b"POST", b"/v1/echo", b"Identity")).replace(b"Host", b"Connection: close\r\nHost")
    )
    assert answer.endswith(b'{"bytes":1}')


async def test_a_refused_body_is_not_read_for_longer_than_the_client_needs(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_runtime.http.server.LINGER_S", 0.1)
    async with asyncio.timeout(5):
        answer = await server.raw((CODED % (b"POST", b"/v1/echo", b"gzip")).replace(b"Length: 1", b"Length: 900"))
    assert answer.startswith(b"HTTP/1.1 415 ")


BAD_CHUNK = b"%b %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.parametrize(
    ("method", "path", "at_once", "status"),
    [
        (b"POST", b"/v1/echo", True, b"400"),
        (b"GET", b"/metrics", True, b"400"),
        (b"POST", b"/v1/echo", False, b"400"),
        (b"GET", b"/metrics", False, b"200"),
    ],
)
async def test_a_bad_chunk_is_the_clients_fault_and_no_traceback_is_logged(
    server: Served, method: bytes, path: bytes, at_once: bool, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as lines:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(BAD_CHUNK % (method, path))
            if not at_once:
                await server.get("/metrics")
            writer.write(b"zz\r\n")
            async with asyncio.timeout(5):
                answer = await reader.read()
        finally:
            writer.close()
    assert answer.split(b" ")[1] == status
    assert answer.count(b"HTTP/1.") == 1
    assert caplog.records == []
    assert {line["log_level"] for line in lines} <= {"debug"}
