"""HTTP of every process: one error body, one refusal of requests without a token, a server that stops in order."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import make_mocked_request
from prometheus_client.exposition import choose_encoder
from structlog.testing import capture_logs

from kv_runtime.http.acceptor import PortUsed
from kv_runtime.http.access import OPEN_PATHS
from kv_runtime.http.answers import error_body
from kv_runtime.http.hosts import is_loopback
from kv_runtime.http.metrics import SAMPLES_AT_ONCE, metrics_handler
from kv_runtime.http.server import HttpServer
from kv_runtime.telemetry import Projection, counter, gauge, histogram, new_registry
from router.native import built
from tests.unit.kv_runtime.http_server import BODY_BYTES_MAX, SHAPE, TOKEN, Gate, Served, application, served

# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "status", "kind", "words"),
    [
        ("/v1/none", 404, "invalid_request_error", "GET /v1/none: Not Found"),
        ("/" + "p" * 4000, 404, "invalid_request_error", f"GET /{'p' * 79}...: Not Found"),
        ("/v1/echo", 405, "invalid_request_error", "GET /v1/echo: Method Not Allowed"),
        ("/v1/unavailable", 503, "server_error", "Service Unavailable"),
        ("/v1/fail", 500, "server_error", "our fault: ValueError; see the log"),
    ],
)
async def test_every_refusal_has_an_openai_body(server: Served, path: str, status: int, kind: str, words: str) -> None:
    found, body = await server.get(path)
    error = json.loads(body)["error"]
    assert (found, set(error), error["type"]) == (status, SHAPE, kind)
    assert words in error["message"]


async def test_a_fault_of_ours_is_logged_and_not_told(server: Served) -> None:
    with capture_logs() as lines:
        _, body = await server.get("/v1/fail")
    assert b"xyzzy" not in body
    assert [(line["event"], line["path"]) for line in lines] == [("request_failed", "/v1/fail")]


async def test_an_answer_that_had_begun_is_cut_and_not_followed_by_another(server: Served) -> None:
    with capture_logs() as lines:
        answer = await server.raw(b"GET /v1/fail_late HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"data: 1\n\n" in answer
    assert b"our fault" not in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert [line["event"] for line in lines] == ["request_failed"]


async def test_a_client_that_went_away_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    left, noticed = asyncio.Event(), asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await left.wait()
        try:
            while True:
                await response.write(bytes(1 << 20))
        finally:
            noticed.set()

    app = application()
    app.router.add_get("/v1/endless", endless)
    with capture_logs() as lines:
        async with served(app) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /v1/endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
            left.set()
            await noticed.wait()
    assert (lines, caplog.records) == ([], [])


async def test_a_redirection_is_no_error(server: Served) -> None:
    async with server.session.get("/v1/redirect", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "/v1/echo")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_bound_is_a_413(server: Served, chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield bytes(BODY_BYTES_MAX // 10)

    assert await server.post("/v1/echo", bytes(BODY_BYTES_MAX)) == (200, b'{"bytes":1000}')
    body = chunks() if chunked else bytes(BODY_BYTES_MAX + 1)
    async with server.session.post("/v1/echo", data=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"], error["code"]) == (413, "invalid_request_error", "body_too_large")
    assert "1000" in error["message"]
    assert set(error) == SHAPE


# ---------------------------------------------------------------- token


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer t0ke",
        b"Bearer t0ken0",
        b"bearer t0ken",
        b"Basic t0ken",
        b"t0ken",
        b"Bearer  t0ken",
        b"Bearer \xff\xfe",
        "Bearer tökén".encode(),
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        b"POST /v1/echo",
        b"GET /v1/none",
        b"GET //metrics",
        b"GET /metrics%2f..%2fv1",
        b"GET /v1/fail",
    ],
)
async def test_requests_without_the_token_are_refused_alike_for_any_path(line: bytes, given: bytes | None) -> None:
    header = b"" if given is None else b"Authorization: " + given + b"\r\n"
    async with served(application(TOKEN)) as server:
        answer = await server.raw(line + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert body == error_body("Authorization: a bearer token is needed", "authentication_error")


async def test_with_the_token_everything_is_as_without_one() -> None:
    async with served(application(TOKEN)) as server:
        assert (await server.post("/v1/echo", b"x", Authorization=f"Bearer {TOKEN}"))[0] == 200
        assert (await server.get("/v1/none", Authorization=f"Bearer {TOKEN}"))[0] == 404


async def test_a_token_may_be_any_text() -> None:
    async with served(application("tökén")) as server:
        header = "Authorization: Bearer tökén".encode()
        answer = await server.raw(
            b"GET /v1/none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n\r\n"
        )
    assert answer.startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_open_paths_need_no_token(path: str) -> None:
    async with served(application(TOKEN)) as server:
        assert (await server.get(path))[0] == (200 if path == "/metrics" else 404)


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
@pytest.mark.parametrize(("family_s", "turns_min", "turns_max"), [(0.002, 21, 23), (0.0001, 2, 4), (0.0, 0, 1)])
async def test_what_is_scraped_is_the_whole_registry_and_other_tasks_go_on_each_millisecond(
    accept: str, family_s: float, turns_min: int, turns_max: int
) -> None:
    registry, turns, now_s = new_registry(), 0, 0.0

    def now() -> float:
        nonlocal now_s
        now_s += family_s
        return now_s

    Projection(registry, lambda: [gauge(f"g{number}", "G", ("x",), [(("a",), number)]) for number in range(20)])
    Projection(registry, lambda: [counter("c", "C", (), [((), 1.0)])])

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.ensure_future(count_turns())
    response = await metrics_handler(registry, now)(make_mocked_request("GET", "/metrics", headers={"Accept": accept}))
    others.cancel()
    encoder, content_type = choose_encoder(accept)
    assert isinstance(response, web.Response)
    assert response.body == encoder(registry)
    assert response.headers["Content-Type"] == content_type
    assert turns_min <= turns <= turns_max


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
@pytest.mark.parametrize("samples", [SAMPLES_AT_ONCE, SAMPLES_AT_ONCE + 1, 10 * SAMPLES_AT_ONCE])
async def test_a_large_family_is_encoded_in_parts_with_one_head(accept: str, samples: int) -> None:
    registry, waits = new_registry(), 0

    def now() -> float:
        nonlocal waits
        waits += 1
        return 0.0

    seen = built.Histogram((1.0, 2.0))
    at = [(f"# {number}",) for number in range(samples)]
    Projection(registry, lambda: [gauge("g", "G", ("x",), [(each, 1.0) for each in at])])
    Projection(registry, lambda: [histogram("h", "H", ("x",), [(each, seen) for each in at])])
    response = await metrics_handler(registry, now)(make_mocked_request("GET", "/metrics", headers={"Accept": accept}))
    encoder, _ = choose_encoder(accept)
    assert isinstance(response, web.Response)
    assert response.body == encoder(registry)
    of_histogram = samples * 5
    assert waits == 1 + -(-samples // SAMPLES_AT_ONCE) + -(-of_histogram // SAMPLES_AT_ONCE)


# ---------------------------------------------------------------- the address


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - the address that must not pass
        ("::", False),
        ("10.0.0.1", False),
        ("example.com", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_can_reach(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


async def test_a_used_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortUsed, match=rf"^port: found 127\.0\.0\.1:{port}, which cannot be bound"):
            await HttpServer(application(), "127.0.0.1", port).start()


@pytest.mark.parametrize("host", ["unknown.invalid", "192.0.2.1"])
async def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(PortUsed, match=rf"^port: found {host}:0, which cannot be bound"):
        await HttpServer(application(), host, 0).start()


# ---------------------------------------------------------------- the end


async def test_a_stop_refuses_new_connections_and_lets_running_requests_end() -> None:
    gate = Gate()
    async with served(application(gate=gate)) as server, asyncio.TaskGroup() as group:
        running = group.create_task(server.get("/v1/gate"))
        await gate.entered.wait()
        server.stop.set()
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except ConnectionError:
                break
            writer.close()
            await writer.wait_closed()
        assert not running.done()
        gate.may_leave.set()
        assert await running == (200, b'{"done":true}')


async def test_a_stop_cuts_what_outlasts_the_drain() -> None:
    gate = Gate()
    async with served(application(gate=gate), drain_s=0.1) as server, asyncio.TaskGroup() as group:
        running = group.create_task(failure_of(server))
        await gate.entered.wait()
        server.stop.set()
        assert isinstance(await running, ClientError)
    assert gate.cancelled


async def failure_of(server: Served) -> BaseException:
    with pytest.raises(ClientError) as raised:
        await server.get("/v1/gate")
    return raised.value


async def test_a_stop_does_not_wait_for_idle_connections() -> None:
    async with served(application(), drain_s=60.0) as server:
        await server.get("/metrics")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        server.stop.set()
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
