"""Large request bodies: one is decoded at a time, even if clients disconnect."""

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from kv_protocol.body_limits import SCANNED_BYTES, BodyLimits, Bytes
from kv_protocol.openai.requests import Request, RequestInvalid, decode_completion
from worker_agent.api.bodies import read_request

LARGE = b'{"model":"m","prompt":"%b"}' % (b"x" * SCANNED_BYTES)
WAIT_S = 10.0


class Sent:
    """A request of a client, as far as `read_request` uses it."""

    async def read(self) -> bytes:
        return LARGE


class Decoding:
    """A decoder that waits for `go_on`. `most`: the largest number of threads that decoded at once."""

    def __init__(self, decode: Callable[[Bytes], Request] = decode_completion) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._decode, self._lock = decode, threading.Lock()
        self._running = self.most = 0

    def __call__(self, text: Bytes) -> Request:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        with self._lock:
            self._running -= 1
        return self._decode(text)


def refuse(text: Bytes) -> Request:
    raise RequestInvalid("body", len(text), "none")


def reading(decode: Decoding, thread: Executor) -> asyncio.Task[Any]:
    http: Any = Sent()
    return asyncio.create_task(read_request(http, decode, BodyLimits(), thread))


async def disconnected(decode: Decoding, thread: Executor) -> None:
    """Return once a client has sent a body and left, while a thread decodes the body."""
    first = reading(decode, thread)
    assert await asyncio.to_thread(decode.began.wait, WAIT_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_body_waits_for_the_thread_of_a_client_that_disconnected() -> None:
    decode, thread = Decoding(), ThreadPoolExecutor(1)
    await disconnected(decode, thread)
    second = reading(decode, thread)
    await asyncio.wait({second}, timeout=0.05)
    assert decode.most == 1
    decode.go_on.set()
    request, body = await asyncio.wait_for(second, WAIT_S)
    assert (request.model, body.text, decode.most) == ("m", LARGE, 1)


async def test_a_refused_body_ends_its_work_whether_or_not_its_client_is_there() -> None:
    decode, thread, unheard = Decoding(refuse), ThreadPoolExecutor(1), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    await disconnected(decode, thread)
    decode.go_on.set()
    with pytest.raises(RequestInvalid):
        await asyncio.wait_for(reading(decode, thread), WAIT_S)
    gc.collect()
    assert unheard == []
