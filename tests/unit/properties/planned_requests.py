"""Random fleets, faults and requests on a real data plane; what became of each request is held against what may.

a request    is answered once: with the whole text, the same as without any fault; or with an error in the form of
             the interface, before its stream or as the last of it; or its client left
afterwards   nothing is promised, in flight or kept; every handoff was taken at most once
prefill      ran as often as the request's way says: once, and once more for each handoff that was lost
"""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.unit.router.plane import PROMPT, Plane, running_plane
from tests.unit.router.role_workers import RoleWorker, streamed_text, text_of
from tests.unit.router.upstream import DONE, Exchange, Script, Upstream, answers, says

OK = 200
UNREACHABLE_URL = "http://127.0.0.1:1"
ROLES = ("aggregated", "prefill", "decode")
CUT = says(b"")
FAULTS: dict[str, Script | int] = {
    "cut before its head": CUT,
    "cut in its head": says(b"HTTP/1.1 200 OK\r\ncontent-"),
    "500": answers(500, b"{}"),
    "503": answers(503, b"{}", retry_after="0"),
    "400": answers(400, b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}'),
    "no answer": answers(200, b"{}"),
    "cut at once": 0,
    "cut after one": 1,
    "cut after three": 3,
    "cut before its end": 6,
}
"""Scripts that answer instead, or after how many tokens a stream is cut."""
NOT_TAKEN = "503"
"""The fault with which a decode worker says that it took no handoff. A 400 does not say so: TensorRT-LLM's server
answers 400 to errors in the midst of generation too, so the router takes the handoff for lost."""


@dataclass(frozen=True)
class Wish:
    """A request, and after how many bytes of its answer its client leaves; None: never."""

    tokens: int
    is_streamed: bool
    leaves_after: int | None


@dataclass(frozen=True)
class World:
    """Workers' roles, what is wrong with each of their next requests in turn (empty: nothing), and the requests."""

    roles: tuple[str, ...]
    faults: tuple[tuple[str, ...], ...]
    wishes: tuple[Wish, ...]
    retry_limit: int
    migration_limit: int
    unreachable: frozenset[int]
    """Workers to which no connection can be made."""


wishes = st.builds(
    Wish,
    tokens=st.sampled_from([1, 2, 6]),
    is_streamed=st.booleans(),
    leaves_after=st.sampled_from([None, None, None, 0, 1, 400]),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Return any world."""
    roles = tuple(draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=5)))
    fault = st.sampled_from(["", *FAULTS])
    return World(
        roles=roles,
        faults=tuple(tuple(draw(st.lists(fault, max_size=3))) for _ in roles),
        wishes=tuple(draw(st.lists(wishes, min_size=1, max_size=4))),
        retry_limit=draw(st.integers(0, 2)),
        migration_limit=draw(st.integers(0, 2)),
        unreachable=draw(st.frozensets(st.integers(0, len(roles) - 1), max_size=1)),
    )


class FaultyWorker(RoleWorker):
    """A worker that fails its next requests as it was told, and remembers whose handoffs it took."""

    def __init__(self, role: str, name: str, faults: tuple[str, ...]) -> None:
        super().__init__(role, name)
        self._faults = list(faults)
        self.prefilled: list[int] = []
        """By request, each time that its prompt was computed and answered."""
        self.took: list[tuple[int, str, int, bool]] = []
        """Request, whose handoff, which, and whether it may be lost."""

    async def __call__(self, exchange: Exchange) -> None:
        fault = self._faults.pop(0) if self._faults else ""
        body = json.loads(exchange.received.body)
        number = body["prompt"][-1]
        params = body.get("disaggregated_params", {})
        if self.role == "prefill" and not fault:
            self.prefilled.append(number)
        if params.get("request_type") == "generation_only" and fault != NOT_TAKEN:
            self.took.append((number, params["ctx_info_endpoint"], params["ctx_request_id"], bool(fault)))
        doing = FAULTS.get(fault)
        if isinstance(doing, int):
            self.cut_after = doing if body.get("stream") else None
            doing = None if body.get("stream") else CUT
        self.fault = doing
        await super().__call__(exchange)


async def live(world: World) -> None:
    """Live through a world; raise AssertionError where something was not as it may be."""
    async with AsyncExitStack() as stack:
        limits: dict[str, Any] = {
            "retry_limit": world.retry_limit,
            "migration_limit": world.migration_limit,
            "breaker_failures": 100,
        }
        plane = await stack.enter_async_context(running_plane(**limits))
        workers = []
        for number, (role, faults) in enumerate(zip(world.roles, world.faults, strict=True)):
            worker = FaultyWorker(role, f"w{number}", faults)
            upstream = await stack.enter_async_context(Upstream(worker))
            plane.join(worker.name, UNREACHABLE_URL if number in world.unreachable else upstream.base_url, role=role)
            workers.append(worker)
        async with asyncio.timeout(20):
            answered = await asyncio.gather(*(_asked(plane, number, wish) for number, wish in enumerate(world.wishes)))
            while plane.serving.metrics.inflight or plane.server.inflight:  # noqa: ASYNC110 - sums have no event
                await asyncio.sleep(0)
        for number, (wish, answer) in enumerate(zip(world.wishes, answered, strict=True)):
            _check_answer(text_of([*PROMPT[:-1], number], wish.tokens), wish, answer)
        plane.assert_nothing_is_promised()
        _check_ways(workers)


async def _asked(plane: Plane, number: int, wish: Wish) -> bytes | None:
    """Return all bytes that the client got; None where it left."""
    body = {"max_tokens": wish.tokens, "stream": wish.is_streamed, "stream_options": {"include_usage": True}}
    body["prompt"] = [*PROMPT[:-1], number]
    reader, writer = await plane.dial(body, headers=b"connection: close\r\n")
    if wish.leaves_after is None:
        return await reader.read()
    with suppress(asyncio.IncompleteReadError):
        await reader.readexactly(wish.leaves_after)
    writer.close()
    return None


def _check_answer(expected: str, wish: Wish, answer: bytes | None) -> None:
    if answer is None:
        return
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    if b"x-kv-failure: " in head:
        assert body == b"{}", "the worker's own words"
    elif status != OK:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    elif body == b"{}":
        pass  # a worker said so, and the router does not read answers
    elif not wish.is_streamed:
        assert json.loads(body)["choices"][0]["text"] == expected
    elif b'"error"' in body:
        assert body.endswith(DONE)
        assert (body.count(b'"error"'), body.count(b"[DONE]")) == (1, 1)
    else:
        assert streamed_text(body, usages=(0, 1)) == expected


def _unchunked(data: bytes) -> bytes:
    body = b""
    while True:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert rest == b"\r\n", "bytes behind the end"
            return body
        body, data = body + rest[:length], rest[length + 2 :]


def _check_ways(workers: list[FaultyWorker]) -> None:
    took = [each for worker in workers for each in worker.took]
    times = Counter((source, transfer) for _, source, transfer, _ in took)
    assert max(times.values(), default=1) == 1, "a handoff was taken twice"
    lost = Counter(number for number, _, _, is_lost in took if is_lost)
    for number, count in Counter(number for worker in workers for number in worker.prefilled).items():
        assert count <= 1 + lost[number], "a prompt was prefilled again without need"
