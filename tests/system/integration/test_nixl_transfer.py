"""Embeddings over the fake NIXL: the very bytes, once, and no memory released while the other side may use it."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kv_runtime.clock import SystemClock
from kv_runtime.supervise import run_parts
from tests.support.paths import ROOT
from tests.system.integration.broker import eventually
from tests.unit.worker_agent.media_samples import SAFETENSORS, refused
from worker_agent.api.served_media import embedding_transfer
from worker_agent.media.config import TransferSection
from worker_agent.media.http_transfer import HttpEmbeddingTransfer
from worker_agent.media.nixl_transfer import NixlEmbeddingTransfer
from worker_agent.media.offers import NoRoom
from worker_agent.media.refusals import MediaRefused
from worker_agent.media.transfer import EmbeddingDescriptor, EmbeddingTransfer, NixlDescriptor

FAKE = ROOT / "tests" / "support" / "nixl_fake"
LARGE = bytes(range(256)) * 4096


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FAKE))
    module = importlib.import_module("nixl")
    module.control.reset()
    yield module.control
    del sys.modules["nixl"]


@asynccontextmanager
async def running(store_bytes_max: int = 1 << 30, **times: float) -> AsyncIterator[NixlEmbeddingTransfer]:
    transfer = NixlEmbeddingTransfer(TransferSection(store_bytes_max=store_bytes_max), SystemClock(), **times)
    await transfer.start()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_parts(transfer.parts(0), stop=stop, drain_s=5))
        try:
            yield transfer
        finally:
            stop.set()


async def reason_of(transfer: EmbeddingTransfer, descriptor: EmbeddingDescriptor) -> str:
    with pytest.raises(MediaRefused) as caught:
        await transfer.fetch(descriptor)
    assert descriptor.token not in str(caught.value)
    return refused(caught)


async def test_what_is_offered_here_is_read_there_and_then_let_go(nixl: Any) -> None:
    async with running() as here, running() as there:
        for embeddings in (SAFETENSORS, LARGE):
            told = msgspec.json.encode(await here.offer(embeddings))
            descriptor = msgspec.json.decode(told, type=EmbeddingDescriptor)
            assert isinstance(descriptor, NixlDescriptor)
            assert await there.fetch(descriptor) == embeddings
        await eventually(lambda: here.statistics().entries == 0)
        assert here.statistics().released_total == 2
    assert (nixl.handles, nixl.regions) == (0, 0)


async def test_other_bytes_are_refused(nixl: Any) -> None:
    async with running() as here, running() as there:
        descriptor = msgspec.structs.replace(await here.offer(SAFETENSORS), digest="0" * 64)
        assert await reason_of(there, descriptor) == "digest"
    assert nixl.regions == 0


async def test_more_than_is_allowed_is_neither_kept_nor_read(nixl: Any) -> None:
    async with running(store_bytes_max=1000) as here, running(store_bytes_max=100) as there:
        with pytest.raises(NoRoom):
            await here.offer(bytes(1001))
        descriptor = await here.offer(bytes(999))
        assert await reason_of(there, descriptor) == "too_large"
        with pytest.raises(NoRoom):
            await there.offer(bytes(101))
    assert nixl.regions == 0


async def test_an_agent_that_does_not_exist_is_unreachable(nixl: Any) -> None:
    async with running() as here, running() as there:
        descriptor = await here.offer(SAFETENSORS)
        for agent in (b"{}", b"no agent", b'{"name": "unknown", "regions": []}'):
            assert await reason_of(there, msgspec.structs.replace(descriptor, agent=agent)) == "unreachable"
        assert await reason_of(there, msgspec.structs.replace(descriptor, address=1)) == "unreachable"
    assert (nixl.handles, nixl.regions) == (0, 0)


async def test_a_read_that_takes_too_long_is_given_up(nixl: Any) -> None:
    nixl.steps = 1 << 30
    async with running() as here, running(fetch_s=0.05) as there:
        assert await reason_of(there, await here.offer(SAFETENSORS)) == "timeout"
        assert nixl.handles == 0
    assert nixl.regions == 0


async def test_memory_of_a_read_that_cannot_be_cancelled_is_kept_and_bounds_what_follows(nixl: Any) -> None:
    nixl.steps, nixl.holds = 1 << 30, True
    async with running() as here, running(fetch_s=0.05, store_bytes_max=1000) as there:
        assert await reason_of(there, await here.offer(bytes(600))) == "timeout"
        assert await reason_of(there, await here.offer(bytes(600))) == "unreachable"
    assert (nixl.handles, nixl.regions) == (1, 1)


async def test_a_fetch_that_is_cancelled_leaves_nothing_registered(nixl: Any) -> None:
    nixl.steps = 1 << 30
    async with running() as here, running() as there:
        fetching = asyncio.ensure_future(there.fetch(await here.offer(SAFETENSORS)))
        await eventually(lambda: nixl.handles == 1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert nixl.handles == 0
    assert nixl.regions == 0


async def test_the_two_transports_do_not_read_each_other(nixl: Any) -> None:
    assert isinstance(embedding_transfer(TransferSection(), SystemClock()), NixlEmbeddingTransfer)
    assert isinstance(embedding_transfer(TransferSection(over="http"), SystemClock()), HttpEmbeddingTransfer)
    over_http = HttpEmbeddingTransfer(TransferSection(), SystemClock())
    async with running() as over_nixl:
        assert await reason_of(over_http, await over_nixl.offer(SAFETENSORS)) == "unreachable"
        await over_http.start()
        assert await reason_of(over_nixl, await over_http.offer(SAFETENSORS)) == "unreachable"
        stop = asyncio.Event()
        stop.set()
        await run_parts(over_http.parts(0), stop=stop, drain_s=5)
    assert nixl.regions == 0
