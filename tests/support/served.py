"""Applications and servers on a free port of loopback, for as long as a block lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kv_runtime.http.server import HttpServer


@asynccontextmanager
async def served(what: web.Application | HttpServer) -> AsyncIterator[str]:
    """Yield the address."""
    server = HttpServer(what, "127.0.0.1", 0) if isinstance(what, web.Application) else what
    stop = asyncio.Event()
    await server.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(stop))
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            stop.set()
