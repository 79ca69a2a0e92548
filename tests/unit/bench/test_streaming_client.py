"""One streamed request against servers of other makes: what is read, and that nothing is raised."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.streaming_client import Measured, StreamingClient
from tests.support.manual_clock import ManualClock

ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}\n\n'
TEXT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
THOUGHT = b'data: {"choices": [{"delta": {"reasoning_content": "b"}}]}\n\n'
COMPLETION = b'data: {"choices": [{"text": "c"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
CACHED = USAGE.replace(b"}}", b', "prompt_tokens_details": {"cached_tokens": 8}}}')
NULL_DETAILS = USAGE.replace(b"}}", b', "prompt_tokens_details": null}}')
DONE = b"data: [DONE]\n\n"


class TickingClock(ManualClock):
    """A second passes whenever the time is asked."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = count()

    def now(self) -> float:
        return float(next(self._seconds))


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def sent(url: str) -> tuple[str, Measured]:
    clock = TickingClock()
    async with aiohttp.ClientSession() as session:
        client = StreamingClient(session, url, clock, began_s=clock.now())
        return await client.send("/v1/chat/completions", {"model": "m"})


async def streamed(*events: bytes, status: int = 200) -> tuple[str, Measured]:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.Response(body=b"".join(events), status=status, headers={"x-overlap-blocks": "3"})

    async with serving(answer) as url:
        found = await sent(url)
    assert bodies == [{"model": "m", "stream": True, "stream_options": {"include_usage": True}}]
    return found


@pytest.mark.parametrize(
    ("events", "text", "ttft_s"),
    [((TEXT,), "a", 1.0), ((ROLE, TEXT), "a", 2.0), ((ROLE, THOUGHT, TEXT), "a", 2.0), ((COMPLETION,), "c", 1.0)],
)
async def test_the_first_token_is_the_first_event_with_text(
    events: tuple[bytes, ...], text: str, ttft_s: float
) -> None:
    answer, measured = await streamed(*events, USAGE, DONE)
    assert (answer, measured.ttft_s, measured.error) == (text, ttft_s, "")
    assert (measured.sent_s, measured.predicted_blocks) == (1.0, 3)


@pytest.mark.parametrize(("usage", "cached"), [(USAGE, 0), (CACHED, 8), (NULL_DETAILS, 0)])
async def test_an_endpoint_may_tell_no_cached_tokens(usage: bytes, cached: int) -> None:
    _, measured = await streamed(TEXT, usage, DONE)
    assert (measured.prompt_tokens, measured.output_tokens, measured.cached_tokens) == (9, 2, cached)


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        ((b'{"detail": "no"}',), 503, 'status 503: {"detail": "no"}'),
        ((TEXT, b'data: {"error": {"message": "died"}}\n\n'), 200, '{"message": "died"}'),
        ((b'data: {"error": "died"}\n\n',), 200, '"died"'),
        ((b'data: {"usage": 7}\n\n',), 200, "ValidationError: Expected `object | null`, got `int` - at `$.usage`"),
        ((TEXT,), 200, "the stream ended without [DONE]"),
        ((b"data: {\n\n",), 200, "DecodeError: Input data was truncated"),
    ],
)
async def test_a_failure_is_an_error_of_the_measurement(events: tuple[bytes, ...], status: int, error: str) -> None:
    assert (await streamed(*events, status=status))[1].error == error
