"""The supervisor of processes: how it stops them, and what it does when one ends. Its processes are real."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

import pytest

from kv_runtime.clock import SystemClock
from kv_runtime.supervise import Restarts
from router.processes.links import Links
from router.processes.supervisor import ProcessesFailed, Supervisor, Work

QUICK = Restarts(failures_max=3, window_s=60.0, pause_s=0.01, pause_max_s=0.01)
URL = "http://127.0.0.1:1"


def until_stopped(say: Connection) -> None:
    """Serve, and end at SIGTERM or with the supervisor."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    until_alone(say)


def until_alone(say: Connection) -> None:
    supervisor = parent_process()
    assert supervisor is not None
    say.send(URL)
    wait([supervisor.sentinel])


def deaf(say: Connection) -> None:
    """Serve, and ignore being asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until_alone(say)


def refuses(_: Connection) -> None:
    sys.exit("it cannot be done")


def dies_after_start(say: Connection) -> None:
    say.send(URL)
    os.kill(os.getpid(), signal.SIGKILL)


@asynccontextmanager
async def supervised(stop_s: float = 60.0, **works: Work) -> AsyncIterator[tuple[Supervisor, Links]]:
    async with Links(list(works), SystemClock()) as links:
        made = Supervisor(list(works), lambda name: works[name], links, SystemClock(), stop_s=stop_s, restarts=QUICK)
        yield made, links


async def test_all_serve_after_the_start_and_none_after_a_stop() -> None:
    async with supervised(a=until_stopped, b=until_stopped) as (supervisor, links):
        await supervisor.start()
        assert links.serving() == [("a", URL), ("b", URL)]
        assert [(each.name, each.is_up, each.restarts) for each in supervisor.states()] == [
            ("a", True, 0),
            ("b", True, 0),
        ]
        stop = asyncio.Event()
        stop.set()
        await supervisor.run(stop)
        assert (links.serving(), [each.pid for each in supervisor.states()]) == ([], [0, 0])


async def test_a_process_that_cannot_start_ends_the_others() -> None:
    async with supervised(a=until_stopped, b=refuses) as (supervisor, links):
        with pytest.raises(ProcessesFailed, match="process b ended with exit code 1 before it had started"):
            await supervisor.start()
        assert links.serving() == []


async def test_a_process_that_ends_again_and_again_ends_all() -> None:
    async with supervised(a=until_stopped, b=dies_after_start) as (supervisor, links):
        await supervisor.start()
        with pytest.raises(ProcessesFailed, match=r"process b was killed by SIGKILL, 3 times in 60 s"):
            await supervisor.run(asyncio.Event())
        assert (links.serving(), supervisor.states()[1].restarts) == ([], 2)


async def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    async with supervised(stop_s=0.2, a=until_stopped, b=deaf) as (supervisor, _):
        await supervisor.start()
        stop = asyncio.Event()
        stop.set()
        with pytest.raises(ProcessesFailed, match="process b was killed by SIGKILL"):
            await supervisor.run(stop)


async def test_a_cancelled_supervisor_leaves_no_process() -> None:
    async with supervised(a=until_stopped, b=until_stopped) as (supervisor, links):
        await supervisor.start()
        running = asyncio.ensure_future(supervisor.run(asyncio.Event()))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert links.serving() == []
