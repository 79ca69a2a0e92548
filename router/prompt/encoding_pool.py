"""Threads that decode and encode long requests while the event loop serves others.

Large text, of more than `LARGE_BYTES`, has its own threads, so that other texts do not wait for it. Text is refused if
with it more than `waiting_bytes_max` would wait, large text if more than three quarters of that would. If no text
waits, any size is accepted.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
LARGE_BYTES = 1 << 20
"""About 0.6 s of work for the slower encoder."""


class EncodersBusy(Exception):
    """Too much text waits for an encoder. A retry may succeed."""

    def __init__(self, waiting_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{waiting_bytes} bytes of prompts wait to be encoded, allowed {limit_bytes}")


class EncodingPool:
    """`threads` threads for text of at most `large_bytes`, and as many again for larger text."""

    def __init__(self, threads: int, waiting_bytes_max: int, *, large_bytes: int = LARGE_BYTES) -> None:
        self._waiting_bytes_max, self._large_bytes = waiting_bytes_max, large_bytes
        self._small, self._large = ThreadPoolExecutor(threads, "encoder"), ThreadPoolExecutor(threads, "encoder-large")
        self.waiting_bytes = self.submitted = self.refused = self.cancelled = 0

    def submit(self, work: Callable[[], T], size_bytes: int) -> "asyncio.Future[T]":
        """Return the future result of `work` on `size_bytes` of text; raise `EncodersBusy` if too much waits.

        Cancelling the future skips work that has not begun, and drops the result of work that has. If `work` raises
        what is no `Exception` (a library's panic), the future raises a `RuntimeError` that names its type.
        """
        is_large, limit_bytes = size_bytes > self._large_bytes, self._waiting_bytes_max
        if is_large:
            limit_bytes -= limit_bytes // 4
        if self.waiting_bytes and self.waiting_bytes + size_bytes > limit_bytes:
            self.refused += 1
            raise EncodersBusy(self.waiting_bytes + size_bytes, limit_bytes)
        threads = self._large if is_large else self._small
        future = asyncio.get_running_loop().run_in_executor(threads, _result, work)
        self.waiting_bytes += size_bytes
        self.submitted += 1
        future.add_done_callback(lambda done: self._ended(done, size_bytes))
        return future

    def _ended(self, future: "asyncio.Future[Any]", size_bytes: int) -> None:
        self.waiting_bytes -= size_bytes
        self.cancelled += future.cancelled()


def _result(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
