"""A connection to a broker that keeps nothing yet."""

from collections.abc import AsyncIterator

import pytest_asyncio

from indexer.embedded import ensure_streams
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker
from tests.system.integration.event_path import NATS, connected


@pytest_asyncio.fixture
async def log(broker: Broker) -> AsyncIterator[EventLog]:
    async with connected(broker.url) as connection:
        await ensure_streams(connection, NATS)
        yield connection
