"""Cells of a bench played side by side in processes of their own, which end with the bench."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import TypeVar

from bench.child import BenchFailed

CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT")


def play_side_by_side(
    play: Callable[[CellT], ResultT], cells: Sequence[CellT], jobs: int
) -> Iterator[tuple[CellT, ResultT]]:
    """Yield each cell and what `play` returns for it, in the order in which they end.

    `jobs` cells at a time run in processes of their own; with `jobs` 1 they run in this process. SIGINT raises
    `KeyboardInterrupt` here and kills the processes, which may be minutes away from the end of a cell; they also end
    with this process. Only for the main thread.

    Raises:
        BenchFailed: a process ended before its cells did; it printed why, unless it was killed.
    """
    if jobs == 1:
        yield from ((cell, play(cell)) for cell in cells)
        return
    spawning = get_context("spawn")  # and not fork: a progress bar has a thread
    with ProcessPoolExecutor(jobs, spawning, _end_with_parent) as pool:
        try:
            with _ignored_by_children():
                playing = {pool.submit(play, cell): cell for cell in cells}
            for ended in as_completed(playing):
                yield playing[ended], ended.result()
        except BrokenProcessPool as error:
            raise BenchFailed("the process of a cell ended early") from error
        finally:
            for process in active_children():
                process.kill()


def _end_with_parent() -> None:
    """End this process, which plays cells, if its parent is killed."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


@contextmanager
def _ignored_by_children() -> Iterator[None]:
    """Processes that start in the block never see SIGINT, which would make them print a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
