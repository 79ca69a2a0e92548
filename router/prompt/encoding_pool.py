"""Threads that decode and encode long requests while the event loop serves others.

submit(work, size)    its outcome, as a future of the calling loop; what it raises that is no `Exception`, such as a
                      library's panic, as a `RuntimeError` that names its type
cancelled             work that was not begun is skipped; the outcome of begun work is dropped
large                 text of more than `LARGE_BYTES` has threads of its own, so that no other waits for it
full                  `EncodersBusy`: more than `waiting_bytes_max` bytes wait, or three quarters of that where the text
                      is large; one text alone always may
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
"""None: a thread is to look whether it is to end."""
LARGE_BYTES = 1 << 20
"""Some 0.6 s of work for the slower encoder."""


class EncodersBusy(Exception):
    """Too much text waits for an encoder: `waiting_bytes`, `limit_bytes`. A retry may succeed."""

    def __init__(self, waiting_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{waiting_bytes} bytes of prompts wait to be encoded, allowed {limit_bytes}")
        self.waiting_bytes = waiting_bytes
        self.limit_bytes = limit_bytes


class EncodingPool:
    """The threads and their queue. Everything except `work` belongs to the event loop's thread."""

    def __init__(
        self, threads: int, waiting_bytes_max: int, *, name: str = "encoder", large_bytes: int = LARGE_BYTES
    ) -> None:
        """`threads` for text of `large_bytes` and less, and as many for larger text."""
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
        """Let all threads look whether they are to end."""
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
    with suppress(RuntimeError):  # the loop has ended, and no caller waits
        future.get_loop().call_soon_threadsafe(_settle, future, *outcome)
    del future, outcome  # an error's traceback keeps this frame: with them it would be a cycle that holds the request


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - it is the outcome of the future
        return None, error
    except BaseException as error:  # noqa: BLE001 - nothing that a library raises ends the thread, and so the process
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _settle(future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
