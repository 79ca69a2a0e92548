"""Connections to a broker that keeps nothing yet, and a server over HTTP."""

from collections.abc import AsyncIterator

import nats
import pytest_asyncio
from nats.aio.client import Client

from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker
from tests.unit.kv_runtime.http_server import Served, application, served
from tests.unit.kv_runtime.log_client import connected


@pytest_asyncio.fixture
async def log(broker: Broker) -> AsyncIterator[EventLog]:
    """An event log whose `run` runs until the test ends."""
    async with connected(broker.url) as connection:
        yield connection


@pytest_asyncio.fixture
async def client(broker: Broker) -> AsyncIterator[Client]:
    """The library's own client, beside ours."""
    connection = await nats.connect(broker.url)
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Served]:
    async with served(application()) as running:
        yield running
