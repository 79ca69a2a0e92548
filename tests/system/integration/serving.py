"""An application served on a free port, and a client of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part, run_parts


class Api(NamedTuple):
    """What is served."""

    session: aiohttp.ClientSession
    url: str

    async def post(self, body: bytes, path: str = "/v1/overlap") -> tuple[int, Any]:
        async with self.session.post(f"{self.url}{path}", data=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[Api]:
    server, stop = HttpServer(app, "127.0.0.1", 0), asyncio.Event()
    await server.start()
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
        group.create_task(run_parts([Part("http", server.run)], stop=stop, drain_s=5.0))
        yield Api(session, f"http://127.0.0.1:{server.port}")
        stop.set()
