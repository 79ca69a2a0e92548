"""A process whose main thread is free for libraries that need it: its event loop runs in another thread.

    main thread    runs the functions given to a `ThreadCall`, one after another
    event loop     everything else, in the thread `event-loop`, on uvloop

    SIGINT, SIGTERM    read from a wakeup descriptor, also during a long call on the main thread
    the first          sets `stop`
    the second         cancels running work
    a late one         (after the event loop's end) ends the process with exit code 1, whatever the main thread does

MPI is such a library: MPI_Finalize belongs to the thread that called MPI_Init, and Python finalizes on the main thread.
Source: MPI standard, MPI_Init_thread (the "main thread" is the one that calls it) and MPI_Finalize; mpi4py, `mpi4py.rc`
(initialized at import, finalized at exit); Python documentation, `signal.set_wakeup_fd`.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Protocol, TypeVar

import uvloop

from kv_runtime.process import STOP_SIGNALS, exit_with_reason, prepare_process

T = TypeVar("T")

_SIGNALS_AT_ONCE = 64


class ThreadCall(Protocol):
    """Runs a function on another thread and awaits its result, as `asyncio.to_thread` does."""

    def __call__(self, function: Callable[[], T], /) -> Coroutine[Any, Any, T]:
        """Return the function's result, or raise its error."""


def run_beside(main: Callable[[asyncio.Event, ThreadCall], Coroutine[Any, Any, None]]) -> None:
    """Run `main(stop, call)` on uvloop in a thread beside the main thread; otherwise as `run_process`.

    `call` runs a function on the main thread, which must be the one that calls `run_beside`. A cancelled call that has
    not begun is not run.
    """
    calls, outcome = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None](), Future[None]()

    async def call(function: Callable[[], T], /) -> T:
        future: Future[T] = Future()
        calls.put((function, future))
        return await asyncio.wrap_future(future)

    def run_loop(signals: socket.socket) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_main(main, signals, call))

    def beside_main(signals: socket.socket) -> None:
        _settle(outcome, partial(run_loop, signals))
        calls.put(None)
        _end_at_a_signal(signals)

    prepare_process()
    with exit_with_reason():
        with _stop_signals() as signals:
            beside = threading.Thread(target=beside_main, args=(signals,), name="event-loop", daemon=True)
            beside.start()
            while (called := calls.get()) is not None:
                function, future = called
                if future.set_running_or_notify_cancel():
                    _settle(future, function)
        beside.join()
        outcome.result()


async def _run_main(
    main: Callable[[asyncio.Event, ThreadCall], Coroutine[Any, Any, None]], signals: socket.socket, call: ThreadCall
) -> None:
    loop, caller, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert caller is not None

    def on_signals() -> None:
        for number in signals.recv(_SIGNALS_AT_ONCE):
            if number in STOP_SIGNALS:
                if stop.is_set():
                    caller.cancel()
                stop.set()

    loop.add_reader(signals.fileno(), on_signals)
    try:
        await main(stop, call)
    finally:
        loop.remove_reader(signals.fileno())


@contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """Yield a socket with a byte for each signal that comes; its other end is closed at the end."""
    signals, wakeup = socket.socketpair()
    os.set_blocking(wakeup.fileno(), False)
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _pass_over) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        wakeup.close()


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """Leave the signal to the reader of the wakeup descriptor."""


def _end_at_a_signal(signals: socket.socket) -> None:
    """Return when the main thread has ended its last call; at a signal before that, end the process."""
    with signals:
        signals.setblocking(True)  # noqa: FBT003  the event loop made it non-blocking
        while numbers := signals.recv(_SIGNALS_AT_ONCE):
            if set(numbers) & set(STOP_SIGNALS):
                sys.stderr.write("stopped by another signal: the main thread was cut off\n")
                sys.stderr.flush()
                os._exit(1)


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    """Call the function; its result, or its error, becomes the outcome, which another thread awaits."""
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001  raised again where the outcome is awaited
        outcome.set_exception(error)
