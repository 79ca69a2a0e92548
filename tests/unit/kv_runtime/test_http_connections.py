"""How many connections an aiohttp server has: its bound, what happens at the bound, and what the metrics say of it."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from kv_runtime.http.connection_limit import CONNECTIONS_MAX, CONNECTIONS_MIN, connections_bound
from kv_runtime.http.server import HttpServer
from kv_runtime.open_files import RESERVED, OpenFiles
from tests.support.descriptors import no_descriptors_left
from tests.unit.kv_runtime.http_server import Gate, application

BOUND = 2
MANY_FILES = OpenFiles(used=20, allowed=1 << 20)
FEW_FILES = OpenFiles(used=20, allowed=20 + RESERVED)
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
async def running(
    gate: Gate | None = None, connections_max: int = BOUND, files: OpenFiles = MANY_FILES
) -> AsyncIterator[Client]:
    """Run a server of at most `connections_max` connections."""
    app = application(gate=gate)
    app.router.add_get("/large", large)
    server = HttpServer(app, "127.0.0.1", 0, connections_max=connections_max, files=lambda: files)
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


async def test_the_bound_follows_the_limit_of_open_files() -> None:
    async with running(connections_max=CONNECTIONS_MAX, files=FEW_FILES) as client:
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
