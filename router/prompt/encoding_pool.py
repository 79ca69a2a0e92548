"""Threads that decode and encode long requests while the event loop serves others.

submit(work, size)    returns a future of the calling loop with the outcome of `work`. If `work` raises what is no
                      `Exception` (a library's panic), the future has a `RuntimeError` that names its type
cancelled future      work that has not begun is skipped; the outcome of work that has begun is dropped
large text            text of more than `LARGE_BYTES` has its own threads, so that other texts do not wait for it
full                  `EncodersBusy`: with this text more than `waiting_bytes_max` bytes would wait, or more than three
                      quarters of that if the text is large. If no other text waits, any size is accepted
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from kv_runtime.supervise import Part, thread_part

T = TypeVar("T")
_Jobs = SimpleQueue[tuple["asyncio.Future[Any]", Callable[[], Any]] | None]
"""None wakes a thread, which then looks whether it should end."""
LARGE_BYTES = 1 << 20
"""About 0.6 s of work for the slower encoder."""


class EncodersBusy(Exception):
    """Too much text waits for an encoder: `waiting_bytes`, `limit_bytes`. A retry may succeed."""

    def __init__(self, waiting_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{waiting_bytes} bytes of prompts wait to be encoded, allowed {limit_bytes}")
        self.waiting_bytes = waiting_bytes
        self.limit_bytes = limit_bytes


class EncodingPool:
    """The threads and their queues. Only `work` and `work_large` may run outside the event loop's thread."""

    def __init__(
        self, threads: int, waiting_bytes_max: int, *, name: str = "encoder", large_bytes: int = LARGE_BYTES
    ) -> None:
        """Use `threads` threads for text of at most `large_bytes`, and as many again for larger text."""
        self._threads, self._name = threads, name
        self._waiting_bytes_max, self._large_bytes = waiting_bytes_max, large_bytes
        self._jobs, self._large_jobs = _Jobs(), _Jobs()
        self.waiting_bytes = 0
        self.submitted = 0
        self.refused = 0
        self.cancelled = 0

    def parts(self, stage: int) -> list[Part]:
        """Return the threads as parts of a process."""
        works = {"": self.work, "-large": self.work_large}
        return [
            thread_part(f"{self._name}{kind}-{at}", work, stage=stage, wake=self.wake)
            for kind, work in works.items()
            for at in range(self._threads)
        ]

    def wake(self) -> None:
        """Wake all threads, so that they look whether they should end."""
        for jobs in (self._jobs, self._large_jobs):
            for _ in range(self._threads):
                jobs.put(None)

    def submit(self, work: Callable[[], T], size_bytes: int) -> "asyncio.Future[T]":
        """Return the future result of `work` on `size_bytes` of text; raise `EncodersBusy` if too much waits."""
        is_large, limit_bytes = size_bytes > self._large_bytes, self._waiting_bytes_max
        if is_large:
            limit_bytes -= limit_bytes // 4
        if self.waiting_bytes and self.waiting_bytes + size_bytes > limit_bytes:
            self.refused += 1
            raise EncodersBusy(self.waiting_bytes + size_bytes, limit_bytes)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.waiting_bytes += size_bytes
        self.submitted += 1
        future.add_done_callback(lambda done: self._ended(done, size_bytes))
        (self._large_jobs if is_large else self._jobs).put((future, work))
        return future

    def work(self, stop: threading.Event) -> None:
        """Run submitted work on text that is not large until `stop` is set; the body of a thread."""
        _work(self._jobs, stop)

    def work_large(self, stop: threading.Event) -> None:
        """Run submitted work on large text until `stop` is set; the body of a thread."""
        _work(self._large_jobs, stop)

    def _ended(self, future: "asyncio.Future[Any]", size_bytes: int) -> None:
        self.waiting_bytes -= size_bytes
        self.cancelled += future.cancelled()


def _work(jobs: _Jobs, stop: threading.Event) -> None:
    while not stop.is_set():
        if (job := jobs.get()) is not None and not job[0].cancelled():
            _do(*job)
        del job


def _do(future: "asyncio.Future[Any]", work: Callable[[], Any]) -> None:
    outcome = _outcome(work)
    with suppress(RuntimeError):  # the loop is closed, so no caller waits
        future.get_loop().call_soon_threadsafe(_settle, future, *outcome)
    del future, outcome  # an error's traceback keeps this frame: a cycle would keep the request in memory


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - it is the outcome of the future
        return None, error
    except BaseException as error:  # noqa: BLE001 - else a library's panic would end the thread, and with it the process
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _settle(future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
