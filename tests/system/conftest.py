"""Processes by fork, and a connection to a broker that keeps nothing yet."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench import processes
from indexer.embedded import ensure_streams
from kv_runtime.event_log import EventLog
from tests.support.forked import begun
from tests.support.trtllm import trtllm
from tests.system.integration.broker import Broker
from tests.system.integration.event_path import NATS, connected
from tests.system.integration.scripted_rank import ScriptedRank

__all__ = ["trtllm"]

E2E = Path(__file__).parent / "e2e"
STARTED = ("test_attached_engine_death", "test_nats_roles")
"""Modules whose fleets are started as a user does it."""


@pytest.fixture(autouse=True, scope="module")
def fleets_by_fork(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let fork, which is all but for nothing, what runs long in tests of whole fleets."""
    is_forked = request.path.is_relative_to(E2E) and request.path.stem not in STARTED
    with pytest.MonkeyPatch.context() as patch:
        if is_forked:
            patch.setattr(processes, "started", begun)
        yield


@pytest_asyncio.fixture
async def log(broker: Broker) -> AsyncIterator[EventLog]:
    async with connected(broker.url) as connection:
        await ensure_streams(connection, NATS)
        yield connection


@pytest_asyncio.fixture
async def scripted(log: EventLog) -> ScriptedRank:
    scripted = ScriptedRank(log)
    await scripted.start()
    return scripted
