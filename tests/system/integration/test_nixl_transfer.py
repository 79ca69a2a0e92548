"""Embeddings over NIXL: the very bytes, once, and no memory released while the other side may use it.

Real agents run where the package is installed, on any machine: `pip install -e '.[nixl]'`. A fake stands for reads that
do not end, which no test can make a real one do.
"""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kv_runtime.clock import SystemClock
from kv_runtime.supervise import run_parts
from tests.support.parts import at_work
from tests.support.paths import ROOT
from tests.system.integration import nixl_sender
from tests.system.integration.broker import eventually
from tests.unit.worker_agent.media_samples import SAFETENSORS, refused
from worker_agent.commands.served_media import embedding_transfer
from worker_agent.media.config import TransferSection
from worker_agent.media.embedding_transfer import EmbeddingTransfer, NoRoom
from worker_agent.media.encode_wire import EmbeddingDescriptor, NixlDescriptor
from worker_agent.media.http_transfer import HttpEmbeddingTransfer
from worker_agent.media.nixl_transfer import NixlEmbeddingTransfer
from worker_agent.media.refusals import MediaRefused

FAKE = ROOT / "tests" / "support" / "nixl_fake"
LARGE = bytes(range(256)) * 4096


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    module = importlib.import_module("nixl")
    del sys.modules["nixl"]
    monkeypatch.setitem(sys.modules, "nixl", module)  # the one before, or none, is there again afterwards
    module.control.reset()
    return module.control


@pytest.fixture
def nixl() -> None:
    pytest.importorskip("nixl", reason="nixl is not installed: pip install -e '.[nixl]'")


@asynccontextmanager
async def running(store_bytes_max: int = 1 << 30, **times: float) -> AsyncIterator[NixlEmbeddingTransfer]:
    transfer = NixlEmbeddingTransfer(SystemClock(), store_bytes_max=store_bytes_max, **times)
    await transfer.start()
    async with at_work(*transfer.parts(0)):
        yield transfer


async def lines(stream: asyncio.StreamReader) -> bytes:
    """Return the next line that is a descriptor; the package writes others."""
    while not (line := await stream.readline()).startswith(b"{"):
        assert line, "the sender has ended"
    return line


async def reason_of(transfer: EmbeddingTransfer[Any, Any], descriptor: EmbeddingDescriptor) -> str:
    with pytest.raises(MediaRefused) as caught:
        await transfer.fetch(descriptor)
    assert descriptor.token not in str(caught.value)
    return refused(caught)


@pytest.mark.usefixtures("nixl")
async def test_what_is_offered_here_is_read_there_and_then_let_go() -> None:
    async with running() as here, running() as there:
        for embeddings in (SAFETENSORS, LARGE):
            told = msgspec.json.encode(await here.offer(embeddings))
            descriptor = msgspec.json.decode(told, type=EmbeddingDescriptor)
            assert isinstance(descriptor, NixlDescriptor)
            assert await there.fetch(descriptor) == embeddings
        await eventually(lambda: len(here.offers) == 0)
        assert (here.offers.taken_total, here.offers.released_total) == (2, 0)
        await here.release(await here.offer(SAFETENSORS))
        assert (here.offers.taken_total, here.offers.released_total) == (2, 1)


@pytest.mark.usefixtures("nixl")
async def test_what_is_not_as_it_was_offered_is_refused() -> None:
    async with running(store_bytes_max=1000) as here, running(store_bytes_max=300) as there:
        descriptor = await here.offer(bytes(200))
        assert await reason_of(there, msgspec.structs.replace(descriptor, digest="0" * 64)) == "digest"
        assert await reason_of(there, msgspec.structs.replace(descriptor, agent=b"no agent")) == "unreachable"
        assert await reason_of(there, msgspec.structs.replace(descriptor, address=1)) == "unreachable"
        with pytest.raises(NoRoom):
            await here.offer(bytes(1001))
        assert await reason_of(there, await here.offer(bytes(301))) == "too_large"


@pytest.mark.usefixtures("nixl")
async def test_another_process_is_read_and_its_death_refuses_what_it_offered() -> None:
    """The sender of an encode worker, and the reader of an aggregated or prefill worker."""
    sender = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.system.integration.nixl_sender", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert sender.stdout is not None
    try:
        async with asyncio.timeout(60), running(fetch_s=5) as there:
            offered = [await lines(sender.stdout) for _ in range(2)]
            first, second = (msgspec.json.decode(line, type=EmbeddingDescriptor) for line in offered)
            assert await there.fetch(first) == nixl_sender.EMBEDDINGS
            sender.kill()
            await sender.wait()
            assert await reason_of(there, second) in ("unreachable", "expired", "timeout")
            assert not len(there.offers)
    finally:
        if sender.returncode is None:
            sender.kill()


async def test_a_read_that_takes_too_long_is_given_up(fake: Any) -> None:
    fake.steps = 1 << 30
    async with running() as here, running(fetch_s=0.05) as there:
        assert await reason_of(there, await here.offer(SAFETENSORS)) == "timeout"
        assert fake.handles == 0
    assert fake.regions == 0


async def test_memory_of_a_read_that_cannot_be_cancelled_is_kept_and_bounds_what_follows(fake: Any) -> None:
    fake.steps, fake.holds = 1 << 30, True
    async with running() as here, running(fetch_s=0.05, store_bytes_max=1000) as there:
        assert await reason_of(there, await here.offer(bytes(600))) == "timeout"
        assert await reason_of(there, await here.offer(bytes(600))) == "unreachable"
    assert (fake.handles, fake.regions) == (1, 1)


async def test_a_fetch_that_is_cancelled_leaves_nothing_registered(fake: Any) -> None:
    fake.steps = 1 << 30
    async with running() as here, running() as there:
        fetching = asyncio.ensure_future(there.fetch(await here.offer(SAFETENSORS)))
        await eventually(lambda: fake.handles == 1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert fake.handles == 0
    assert fake.regions == 0


async def test_the_two_transports_do_not_read_each_other(fake: Any) -> None:
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
    assert fake.regions == 0
