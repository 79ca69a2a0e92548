"""An application served on a free port, and a client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from tests.support.served import served


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
    async with served(app) as url, aiohttp.ClientSession() as session:
        yield Api(session, url)
