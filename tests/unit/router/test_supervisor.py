"""The supervisor of processes: how it stops them, and what it does when one ends. Its processes are real."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

import pytest

from kv_runtime.clock import Clock
from kv_runtime.supervise import Restarts
from router.processes.supervisor import Links, ProcessesFailed, Supervisor, Work
from tests.unit.router.plane import until

QUICK = Restarts(failures_max=3, window_s=60.0, pause_s=0.01, pause_max_s=0.01)
URL = "http://127.0.0.1:1"


def until_stopped(say: Connection) -> None:
    """Serve, and end at SIGTERM or with the supervisor."""
    asked, ask = socket.socketpair()
    ask.setblocking(False)
    signal.set_wakeup_fd(ask.fileno())  # a handler in Python would not end a wait that begins as the signal comes
    signal.signal(signal.SIGTERM, lambda *_: None)
    until_alone(say, asked)


def until_alone(say: Connection, *others: socket.socket) -> None:
    supervisor = parent_process()
    assert supervisor is not None
    say.send(URL)
    wait([supervisor.sentinel, *others])


def deaf(say: Connection) -> None:
    """Serve, and ignore being asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until_alone(say)


def refuses(_: Connection) -> None:
    sys.exit("it cannot be done")


def dies_after_start(say: Connection) -> None:
    say.send(URL)
    os.kill(os.getpid(), signal.SIGKILL)


def never_serves(_: Connection) -> None:
    supervisor = parent_process()
    assert supervisor is not None
    wait([supervisor.sentinel])


class Fleet:
    """A supervisor of processes with these works."""

    def __init__(self, links: Links, works: dict[str, Work], stop_s: float) -> None:
        self.links, self.works = links, works
        self.started, self.stop = asyncio.Event(), asyncio.Event()
        self.supervisor = Supervisor(
            list(works), lambda name: self.works[name], links, Clock(),
            stop_s=stop_s, on_started=self.started.set, restarts=QUICK,
        )  # fmt: skip

    async def until_started(self) -> asyncio.Task[None]:
        """Return the supervisor's task once all serve."""
        running = asyncio.create_task(self.supervisor.run(self.stop))
        await self.started.wait()
        return running


@asynccontextmanager
async def supervised(stop_s: float = 60.0, **works: Work) -> AsyncIterator[Fleet]:
    """Afterwards no process lives."""
    async with Links(list(works), Clock()) as links:
        fleet = Fleet(links, works, stop_s)
        yield fleet
        assert (links.urls, {each.pid for each in fleet.supervisor.states()}) == ({}, {0})


async def test_all_serve_after_the_start_and_none_after_a_stop() -> None:
    async with supervised(a=until_stopped, b=until_stopped) as fleet:
        running = await fleet.until_started()
        assert fleet.links.urls == {"a": URL, "b": URL}
        assert [(each.name, each.is_up, each.restarts) for each in fleet.supervisor.states()] == [
            ("a", True, 0),
            ("b", True, 0),
        ]
        fleet.stop.set()
        await running


async def test_a_process_that_cannot_start_ends_those_that_still_start() -> None:
    async with supervised(a=until_stopped, b=refuses, c=never_serves) as fleet:
        with pytest.raises(ProcessesFailed, match="process b ended with exit code 1 before it had started"):
            await fleet.supervisor.run(fleet.stop)


async def test_a_stop_during_the_start_ends_it() -> None:
    async with supervised(a=until_stopped, b=never_serves) as fleet:
        running = asyncio.create_task(fleet.supervisor.run(fleet.stop))
        await until(lambda: bool(fleet.links.urls))
        fleet.stop.set()
        await running
        assert not fleet.started.is_set()


async def test_a_process_that_ends_again_and_again_ends_all() -> None:
    async with supervised(a=until_stopped, b=dies_after_start) as fleet:
        with pytest.raises(ProcessesFailed, match=r"process b was killed by SIGKILL, 3 times in 60 s"):
            await fleet.supervisor.run(fleet.stop)
        assert fleet.supervisor.states()[1].restarts == 2


async def test_a_process_that_cannot_be_started_again_ends_all() -> None:
    async with supervised(a=until_stopped, b=until_stopped) as fleet:
        running = await fleet.until_started()
        del fleet.works["b"]
        os.kill(fleet.supervisor.states()[1].pid, signal.SIGKILL)
        with pytest.raises(ExceptionGroup):
            await running


async def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    async with supervised(stop_s=0.2, a=until_stopped, b=deaf) as fleet:
        running = await fleet.until_started()
        fleet.stop.set()
        with pytest.raises(ProcessesFailed, match="process b was killed by SIGKILL"):
            await running


async def test_a_cancelled_supervisor_leaves_no_process() -> None:
    async with supervised(a=until_stopped, b=until_stopped) as fleet:
        running = await fleet.until_started()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
