"""Requests leave neither memory nor cycles, which only the garbage collector frees: a process lets it run rarely."""

import asyncio
import ctypes
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import pytest

from kv_protocol.fleet import WorkerDraining
from kv_protocol.journal import FleetApplied, TimePassed
from router.decision.policy import Policy
from router.http.limits import HttpLimits
from router.pools.served import Pools
from tests.reference.predictions import SEEN_S
from tests.unit.router.plane import COMPLETIONS, Plane, encoded, running_plane, until
from tests.unit.router.role_workers import RoleWorker
from tests.unit.router.test_handover import asked, draining
from tests.unit.router.upstream import (
    DONE,
    STREAM_HEAD,
    Script,
    Upstream,
    answers,
    chunked,
    completion,
    event,
    says,
    says_and_waits,
    streams,
)

OURS = ("router.", "kv_protocol.", "kv_runtime.", "indexer.")
SMALL, LARGE = 16_000, 300_000
"""Bytes of a prompt: read on the event loop, and on a thread."""
STREAMED = {"stream": True}
BEGUN = event("first")
WARM_UP, REQUESTS = 6, 12
GROWTH_BYTES_MAX = REQUESTS * LARGE


def owner(each: object) -> str:
    """Return the type of an object, or the function of a frame."""
    if isinstance(each, FrameType):
        return f"{each.f_globals.get('__name__')}.{each.f_code.co_name}()"
    return f"{type(each).__module__}.{type(each).__qualname__}"


async def ours(plane: Plane) -> Counter[str]:
    """Return how many objects of ours there are, by type, once time, a scrape and the collector freed what they can."""
    await plane.clock.advance(SEEN_S + 1.0)
    plane.state.apply(TimePassed(now_s=plane.clock.now()))
    plane.hear("w0")
    list(plane.registry.collect())
    gc.collect()
    return Counter(name for name in map(owner, gc.get_objects()) if name.startswith(OURS))


def memory_bytes() -> int:
    """Return the process's memory, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


async def until_memory_is_below(bound: int) -> None:
    """Wait until what clients left behind is encoded, too."""
    async with asyncio.timeout(60):
        while await asyncio.to_thread(memory_bytes) >= bound:
            pass


@pytest.fixture(autouse=True)
def other_tests_left_out() -> None:
    """Let the collector go over what this test makes alone, not over all that earlier ones left: a sixth of the CPU."""
    gc.collect()
    gc.freeze()


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
        found[:] = sorted({name for name in map(owner, gc.garbage) if name.startswith(OURS)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# ------------------------------------------------------------------------------------------- what a client does


Act = Callable[[Plane, Upstream, bytes], Awaitable[None]]


def gets(*statuses: int, path: str = COMPLETIONS, **headers: str) -> Act:
    """Send the request; one of these is the status of the answer."""

    async def act(plane: Plane, _worker: Upstream, body: bytes) -> None:
        answer = await plane.post(body, path, **headers)
        assert answer.status in statuses, answer.body[:300]

    return act


async def leaves_before_the_answer(plane: Plane, worker: Upstream, body: bytes) -> None:
    received = len(worker.received)
    _, writer = await plane.dial(body)
    await until(lambda: len(worker.received) > received)
    await left(plane, writer)


async def leaves_in_the_stream(plane: Plane, _worker: Upstream, body: bytes) -> None:
    reader, writer = await plane.dial(body)
    await reader.readuntil(BEGUN)
    await left(plane, writer)


async def leaves_at_once(plane: Plane, _worker: Upstream, body: bytes) -> None:
    """The body is read or the prompt encoded meanwhile, or the worker asked."""
    _, writer = await plane.dial(body)
    await writer.drain()
    await left(plane, writer)


async def leaves_while_its_worker_is_dialed(plane: Plane, _worker: Upstream, body: bytes) -> None:
    _, writer = await plane.dial_bytes(b"")
    dialing = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        dialing.set()
        await asyncio.Event().wait()

    with patch.object(asyncio.get_running_loop(), "create_connection", never):
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        await dialing.wait()
        await left(plane, writer)


async def leaves_within_its_body(plane: Plane, _worker: Upstream, body: bytes) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    _, writer = await plane.dial_bytes(head + body[: len(body) // 2])
    await left(plane, writer)


async def left(plane: Plane, writer: Any) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    await until(lambda: not plane.server.connections and plane.serving.metrics.inflight == 0)


# ------------------------------------------------------------------------------------------- kinds of outcome


class Outcome(NamedTuple):
    """`changes` of the request; `worker` as it answers, `joined` as it registers; `running`: the router's settings."""

    act: Act
    changes: Mapping[str, Any] = {}
    worker: Script = answers(200, completion())
    joined: Mapping[str, Any] = {}
    running: Mapping[str, Any] = {}


REFUSED = Outcome(gets(400), {"nvext": 7})
OUTCOMES = {
    "answered": Outcome(gets(200)),
    "streamed": Outcome(gets(200), STREAMED, streams(event(), DONE)),
    "an invalid option": REFUSED,
    "an invalid header": Outcome(gets(400, x_request_priority="high")),
    "an unknown model": Outcome(gets(404), {"model": "another"}),
    "an unknown path": Outcome(gets(404, path="/v1/another")),
    "an endpoint that is not served": Outcome(gets(404), joined={"api_endpoints": ("embeddings",)}),
    "not JSON": Outcome(gets(400), {"prompt": b"cut"}),
    "a body that is too large": Outcome(
        gets(413), running={"limits": HttpLimits(body_bytes_max=SMALL // 2, drain_s=0)}
    ),
    "a prompt that is too long": Outcome(gets(400), joined={"max_seq_len": 70}),
    "pinned to an unknown worker": Outcome(gets(400, x_worker_instance_id="another")),
    "no worker is named": Outcome(gets(400), running={"policy": Policy(mode="direct")}),
    "all workers drain": Outcome(gets(503), joined={"is_draining": True}),
    "the worker fails": Outcome(gets(500, 503), worker=answers(500)),
    "the worker is busy": Outcome(gets(503), worker=answers(503)),
    "the worker refuses": Outcome(gets(422), worker=answers(422)),
    "the worker closes": Outcome(gets(502, 503), worker=says(b"")),
    "the worker sends no HTTP": Outcome(gets(502, 503), worker=says(b"no head\r\n\r\n")),
    "the stream is cut": Outcome(gets(200, 503), STREAMED, says(STREAM_HEAD + chunked(BEGUN))),
    "the client leaves before the answer": Outcome(leaves_before_the_answer, {}, says_and_waits(b"")),
    "the client leaves in the stream": Outcome(
        leaves_in_the_stream, STREAMED, says_and_waits(STREAM_HEAD + chunked(BEGUN))
    ),
    "the client leaves while its worker is dialed": Outcome(leaves_while_its_worker_is_dialed),
    "the client leaves at once": Outcome(leaves_at_once, {}, says_and_waits(b"")),
    "the client leaves within its body": Outcome(leaves_within_its_body),
}


def body_of(outcome: Outcome, size: int) -> bytes:
    changes = {"prompt": "x" * size, "max_tokens": 2} | dict(outcome.changes)
    if changes["prompt"] == b"cut":
        return encoded({"prompt": "x" * size})[:-1]
    return encoded(changes)


@asynccontextmanager
async def served(outcome: Outcome, size: int) -> AsyncIterator[tuple[Plane, Callable[[], Awaitable[None]]]]:
    """Give a function that sends a request whose outcome this is."""
    running: dict[str, Any] = {"limits": HttpLimits(body_bytes_max=4 * LARGE, drain_s=0), "decisions_max": 2} | dict(
        outcome.running
    )
    joined = dict(outcome.joined)
    is_draining = joined.pop("is_draining", False)
    async with running_plane(**running) as plane, Upstream(outcome.worker) as worker:
        plane.join("w0", worker.base_url, **joined)
        if is_draining:
            draining = WorkerDraining(worker_id="w0", instance="w0-1")
            plane.state.apply(FleetApplied(now_s=plane.clock.now(), event=draining))

        async def send() -> None:
            await outcome.act(plane, worker, body_of(outcome, size))
            worker.received.clear()

        yield plane, send


@pytest.mark.parametrize("kind", OUTCOMES)
async def test_no_outcome_leaves_memory_or_a_cycle(kind: str) -> None:
    for size in (SMALL, LARGE):
        async with served(OUTCOMES[kind], size) as (plane, send):
            for _ in range(WARM_UP):
                await send()
            with collected() as found:
                await send()
            assert found == []
            before, memory = await ours(plane), memory_bytes()
            for _ in range(REQUESTS):
                await send()
            grown = await ours(plane) - before
            assert {name for name, count in grown.items() if count > 0.8 * REQUESTS} == set()
            await until_memory_is_below(memory + GROWTH_BYTES_MAX)


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


def test_the_pools_of_a_request_leave_nothing_to_the_collector() -> None:
    service: Any = None  # nothing is asked of it
    with collected() as found:
        Pools(service)
    assert found == []


async def test_a_prompt_that_is_computed_for_a_cache_leaves_nothing_to_the_collector() -> None:
    async with draining(answers(500), RoleWorker()) as drained:
        drained.recent.add(asked(1))
        with collected() as found:
            assert (await drained.drain()).warmed == 1
    assert [name for name in found if name.startswith("router.drain.warming")] == []
