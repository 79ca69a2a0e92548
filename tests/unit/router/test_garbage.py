"""Requests leave nothing that only the garbage collector could free: a process lets it run rarely."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.unit.router.plane import Plane, running_plane, until
from tests.unit.router.role_workers import RoleWorker
from tests.unit.router.upstream import Upstream, answers, chunked, completion, event, says_and_waits

OURS = ("router.", "kv_protocol.", "kv_runtime.", "indexer.")
STREAMED = {"stream": True}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BEGUN = event("first")


@contextmanager
def collected() -> Iterator[list[str]]:
    """Give the types of ours of which the collector has to free objects after the block."""
    found = list[str]()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage]
        found[:] = sorted({each for each in found if each.startswith(OURS)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def answered(plane: Plane) -> None:
    """A whole answer, a stream, and a request that is refused."""
    assert (await plane.post()).status == 200
    assert (await plane.post(STREAMED)).status == 200
    assert (await plane.post(b"{")).status == 400


@pytest.mark.asyncio
async def test_a_request_leaves_no_cycles() -> None:
    async with (
        running_plane() as plane,
        Upstream(answers(200, completion())) as worker,
        Upstream(answers(500)) as failing,
    ):
        plane.join("w0", worker.base_url)
        await answered(plane)
        with collected() as found:
            await answered(plane)
        assert found == []
        plane.join("w1", failing.base_url, holds=3)
        with collected() as found:
            assert (await plane.post()).status == 200
        assert len(failing.received) == 1
        assert found == []


async def left_in_a_stream(plane: Plane) -> None:
    """A client reads the beginning of a stream and leaves."""
    before = plane.serving.inflight
    reader, writer = await plane.dial()
    await reader.readuntil(BEGUN)
    writer.close()
    await until(lambda: plane.serving.inflight == before)
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_client_that_leaves_in_a_stream_leaves_no_cycles() -> None:
    async with running_plane() as plane, Upstream(says_and_waits(STREAM_HEAD + chunked(BEGUN))) as worker:
        plane.join("w0", worker.base_url)
        await left_in_a_stream(plane)
        with collected() as found:
            await left_in_a_stream(plane)
        assert found == []


@pytest.mark.asyncio
async def test_prefill_and_decode_apart_leave_no_cycles() -> None:
    async with (
        running_plane() as plane,
        Upstream(RoleWorker("prefill")) as prefill,
        Upstream(RoleWorker("decode")) as decode,
    ):
        plane.join("p0", prefill.base_url, role="prefill")
        plane.join("d1", decode.base_url, role="decode")
        for _ in range(2):
            with collected() as found:
                assert (await plane.post(STREAMED | {"max_tokens": 6})).status == 200
        assert found == []


@pytest.mark.planted
def test_a_cycle_is_found() -> None:
    with collected() as found:
        plane: Any = type("Planted", (), {"__module__": "router.planted"})()
        plane.itself = plane
        del plane
    assert found == ["router.planted.Planted"]
