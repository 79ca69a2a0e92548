"""A broker of each test's own, and a connection to it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from indexer.embedded import ensure_streams
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker, running_broker
from tests.system.integration.event_path import NATS, connected


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running_broker(tmp_path / "store") as running:
        yield running


@pytest_asyncio.fixture
async def log(broker: Broker) -> AsyncIterator[EventLog]:
    async with connected(broker.url) as connection:
        await ensure_streams(connection, NATS)
        yield connection
