"""A plane for each test that takes one."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.unit.router.plane import Plane, running_plane


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[Plane]:
    async with running_plane() as running:
        yield running
