"""Cells of a bench played side by side in processes of their own, which end with the bench."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT")
_context = get_context("spawn")  # and not fork: a progress bar has a thread


class CellFailed(Exception):
    """The process that played a cell ended before the cell did; it printed why, unless it was killed."""


def play_side_by_side(
    play: Callable[[CellT], ResultT], cells: Sequence[CellT], jobs: int
) -> Iterator[tuple[CellT, ResultT]]:
    """Yield each cell and what `play` returns for it, in the order in which they end.

    `jobs` cells at a time run in processes of their own; with `jobs` 1 they run in this process. SIGINT and SIGTERM
    raise `KeyboardInterrupt` here and kill the processes, which may be minutes away from the end of a cell. Only for
    the main thread.

    Raises:
        CellFailed: a process ended early.
    """
    if jobs == 1:
        yield from ((cell, play(cell)) for cell in cells)
        return
    waiting, running = iter(cells), dict[Connection, CellT]()
    with _terminated_like_interrupted(), ExitStack() as processes:
        connections = [processes.enter_context(_process()) for _ in range(min(jobs, len(cells)))]
        for connection, cell in zip(connections, waiting, strict=False):
            running[connection] = cell
            connection.send(play)
            connection.send(cell)
        while running:
            for ready in wait(running):
                assert isinstance(ready, Connection)
                cell = running.pop(ready)
                result = _result(ready, cell)
                for following in islice(waiting, 1):
                    running[ready] = following
                    ready.send(following)
                yield cell, result


def _result(connection: Connection, cell: object) -> Any:  # noqa: ANN401 - what `play` returned
    try:
        return connection.recv()
    except EOFError as error:
        raise CellFailed(f"{cell}: its process ended early") from error


@contextmanager
def _process() -> Iterator[Connection]:
    """Yield the connection to a process that plays cells; it is gone afterwards."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_play_cells, args=(theirs,), daemon=True)
    try:
        with _interrupts_held_back():
            process.start()
        theirs.close()
        yield ours
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        ours.close()


def _play_cells(connection: Connection) -> None:
    """Answer each cell with its result until the other end closes; the function to play them comes first."""
    try:
        play = connection.recv()
        while True:
            connection.send(play(connection.recv()))
    except (EOFError, BrokenPipeError):
        return


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start processes in the block: they never see SIGINT; here `KeyboardInterrupt` comes behind the block.

    A child that sees SIGINT prints a traceback, and so does one whose start is broken off. The mask is inherited by the
    child; it does not protect the start, because another thread of this process may take the signal.
    """
    resource_tracker.ensure_running()  # which unblocks the signal when it starts
    held_back: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: held_back.append(number)) for number in numbers]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if held_back:
        raise KeyboardInterrupt


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt` within the block; by default it would leave the processes behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
