"""Runs a process: signals, the event loop, memory and garbage, and the reason when it is cut off.

A child process gets only the variables of `child_environment`; others may hold secrets.
"""

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import click
import uvloop

from kv_runtime.files import raise_open_files
from kv_runtime.supervise import DrainOverdue, until

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_MADE_BEFORE_COLLECTION = 20_000
_PASSED_ON = frozenset(
    (
        *("HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE"),
        *("TEMP", "TMP", "TMPDIR", "TZ"),
        *("GOGC", "GOMAXPROCS", "GOMEMLIMIT"),  # of a nats-server
        *("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    )
)
"""Variables with paths of programs, libraries and temporary files; the language; limits of language runtimes."""

_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN = -3, 1 << 20


class Stopped(Exception):
    """A signal came before the end of a command's work."""


def child_environment() -> dict[str, str]:
    """Return the environment of a child process: what cannot be a secret."""
    return {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")}


@contextmanager
def signals_set(stop: asyncio.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set `stop` in this context.

    A further signal cancels the calling task at once; the next one has the system's default effect. Only for the main
    thread's event loop.
    """
    loop, caller = asyncio.get_running_loop(), asyncio.current_task()
    assert caller is not None

    def undo() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        if stop.is_set():
            undo()
            caller.cancel()
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        undo()


def printable(text: str) -> str:
    """Return one line that no terminal obeys: characters that are not printable, as ESC and newlines, are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def print_lines(*lines: str, err: bool = False) -> None:
    """Print lines for people, each `printable`: names in them come from the network."""
    for line in lines:
        click.echo(printable(line), err=err)


def print_json(value: bytes) -> None:
    """Print JSON for programs on one line, in ASCII: its names come from the network, and a terminal may obey them."""
    click.echo(json.dumps(json.loads(value), separators=(",", ":")))


class PrintedLines:
    """Prints what a command follows, as text or as JSON; sets `done` after `limit` lines (None: never)."""

    def __init__(self, done: asyncio.Event, limit: int | None, *, as_json: bool) -> None:
        self._done, self._left, self._as_json = done, limit, as_json

    def show(self, text: Callable[[], str], value: Callable[[], bytes]) -> None:
        """Print a line, unless there were enough: `text` for people, or `value`, which is JSON."""
        if self._left == 0:
            return
        if self._as_json:
            print_json(value())
        else:
            print_lines(text())
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self._done.set()


def prepare_process() -> None:
    """Raise the limit of open files to the hard limit, and set how memory is taken and garbage collected."""
    raise_open_files()
    _map_large_blocks()
    _collect_rarely()


def _map_large_blocks() -> None:
    """Make glibc allocate blocks of 1 MiB and more as separate mappings; no effect with other C libraries.

    By default glibc takes blocks of up to 32 MiB from its heap, once larger ones were freed. A buffer that grows there
    is copied repeatedly, up to 32 MiB at a time: tens of milliseconds in which nothing else runs. A mapping is moved.
    Source: mallopt(3), `M_MMAP_THRESHOLD`.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)


def _collect_rarely() -> None:
    """Have Python look for garbage when 20,000 more objects were made than freed; by default 700 in Python 3.11.

    Requests leave no cycles that only the collector frees (`tests/unit/router/test_garbage.py`), but the newest
    decisions are kept: at 700 a router spends 2 to 5 % of its CPU on looking through them, and stops for it each time.
    TensorRT-LLM has the same number: `TorchLlmArgs.garbage_collection_gen0_threshold`.
    """
    gc.set_threshold(_MADE_BEFORE_COLLECTION, *gc.get_threshold()[1:])


def run_process(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `main(stop)` on uvloop until it returns; SIGINT and SIGTERM set `stop`.

    The limit of open files is raised to the hard limit: every connection takes one. Garbage is collected rarely.
    A second signal cuts off running work: the process ends at once, with exit code 1 and a line with the reason.
    A drain beyond its budget ends the same way.
    """

    async def main_task() -> None:
        stop = asyncio.Event()
        with signals_set(stop):
            await main(stop)

    prepare_process()
    with exit_with_reason(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main_task())


def run_to_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what `work` returns, run as by `run_process`; raise `Stopped` if a signal comes first."""
    outcome: list[T] = []

    async def working() -> None:
        outcome.append(await work())

    async def main(stop: asyncio.Event) -> None:
        await until(stop, working())

    run_process(main)
    if not outcome:
        raise Stopped("stopped")
    return outcome[0]


@contextmanager
def exit_with_reason() -> Iterator[None]:
    """Exit with code 1 and a line with the reason if the process was cut off."""
    try:
        yield
    except asyncio.CancelledError:
        sys.exit("stopped by a second signal: what was running was cut off")
    except DrainOverdue as error:
        sys.exit(str(error))
