"""An aiohttp server with handlers that fail, wait or echo, and a client of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry, Gauge

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, openai_errors
from kv_runtime.http.metrics import metrics_handler
from kv_runtime.http.server import HttpServer

TOKEN = "t0ken"
BODY_BYTES_MAX = 1000
SHAPE = {"message", "type", "param", "code"}


class Gate:
    """A handler that says when it was entered and leaves when it may."""

    def __init__(self) -> None:
        self.entered, self.may_leave = asyncio.Event(), asyncio.Event()
        self.cancelled = False

    async def handle(self, _: web.Request) -> web.StreamResponse:
        self.entered.set()
        try:
            await self.may_leave.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return json_response({"done": True})


async def echo(request: web.Request) -> web.StreamResponse:
    return json_response({"bytes": len(await request.read())})


async def fail(_: web.Request) -> web.StreamResponse:
    raise ValueError("the secret is xyzzy")


async def fail_late(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    raise ValueError("the secret is xyzzy")


async def redirect(_: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/v1/echo")


async def unavailable(_: web.Request) -> web.StreamResponse:
    raise web.HTTPServiceUnavailable


def application(token: str = "", gate: Gate | None = None) -> web.Application:
    registry = CollectorRegistry()
    Gauge("kvrouter_test", "A gauge", registry=registry).set(7)
    app = web.Application(middlewares=[openai_errors, require_token(token)], client_max_size=BODY_BYTES_MAX)
    app.add_routes(
        [
            web.post("/v1/echo", echo),
            web.get("/v1/fail", fail),
            web.get("/v1/fail_late", fail_late),
            web.get("/v1/redirect", redirect),
            web.get("/v1/unavailable", unavailable),
            web.get("/metrics", metrics_handler(registry)),
            *([web.get("/v1/gate", gate.handle)] if gate else []),
        ]
    )
    return app


class Served:
    """A server that runs, a client of it, and its stop."""

    def __init__(self, server: HttpServer, session: ClientSession, stop: asyncio.Event) -> None:
        self.port = server.port
        self.session, self.stop = session, stop

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self.session.get(path, headers=headers) as response:
            return response.status, await response.read()

    async def post(self, path: str, data: bytes, **headers: str) -> tuple[int, bytes]:
        async with self.session.post(path, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def raw(self, request: bytes) -> bytes:
        """Send bytes as they are; return all that comes until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer


@asynccontextmanager
async def served(
    app: web.Application, drain_s: float = 5.0, *, handler_cancellation: bool = False
) -> AsyncIterator[Served]:
    server = HttpServer(app, "127.0.0.1", 0, drain_s=drain_s, handler_cancellation=handler_cancellation)
    stop = asyncio.Event()
    await server.start()
    running = asyncio.ensure_future(server.run(stop))
    try:
        async with ClientSession(f"http://127.0.0.1:{server.port}") as session:
            yield Served(server, session, stop)
    finally:
        stop.set()
        await running
