"""A broker of each test's own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.system.integration.broker import Broker, running_broker


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running_broker(tmp_path / "store") as running:
        yield running
