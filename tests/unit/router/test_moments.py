"""Past moments: what becomes of one when its process is slow, dies, is not used, or is in the way of a newer one.

A shell stands for `indexer at`: it says what that says, on real pipes.
"""

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import IndexSection, NatsSection
from router.live.moment_process import MomentLimits
from router.live.moments import MOMENTS_MAX, PROCESSES_MAX, Moments

READING, READY = '{"state":"reading","messages":3,"of":9}', '{"state":"ready","messages":9,"of":9,"stream_seq":9}'
SHORT_S = 0.05


def saying(*lines: str, then: str = "exec cat") -> tuple[str, ...]:
    """Return a program that says these lines; then, by default, it runs until its input ends."""
    return ("sh", "-c", "\n".join([*(f"echo {shlex.quote(line)}" for line in lines), then]))


class Kept:
    """The moments of a control plane, as its clients see them."""

    def __init__(self, moments: Moments, client: TestClient[web.Request, web.Application]) -> None:
        self.moments, self._client = moments, client
        self._others = psutil.Process().children()

    async def ask(self, at_s: float) -> dict[str, Any]:
        """Return the answer to a request for the moment of a time."""
        async with self._client.post("/v1/moments", json={"at_s": at_s}) as response:
            return dict(await response.json())

    async def listed(self) -> list[dict[str, Any]]:
        """Return the moments that are kept."""
        async with self._client.get("/v1/moments") as response:
            return list((await response.json())["moments"])

    async def until_states(self, *states: str) -> list[dict[str, Any]]:
        """Return the moments once they are in these states."""
        found = await self.listed()
        while [each["state"] for each in found] != list(states):
            found = await self.listed()
        return found

    async def until_processes(self, count: int) -> list[psutil.Process]:
        """Return the processes of moments once there are so many."""
        while len(found := self.processes()) != count:
            await self.listed()
        return found

    def processes(self) -> list[psutil.Process]:
        """Return the processes of moments that have not ended."""
        return [each for each in psutil.Process().children() if each not in self._others]


@asynccontextmanager
async def kept(program: tuple[str, ...], **limits: float) -> AsyncIterator[Kept]:
    """Moments whose process is the program; leaving the block stops them, and none of their processes remains."""
    url = "nats://127.0.0.1:1"
    moments = Moments(
        url, NatsSection(url=url), IndexSection(), SystemClock(), limits=MomentLimits(**limits), program=program
    )
    app, stop = web.Application(), asyncio.Event()
    app.add_routes(moments.routes())
    app.add_routes([web.get("/v1/prefix-tree", moments.tree)])
    async with asyncio.TaskGroup() as group, TestClient(TestServer(app)) as client:
        group.create_task(moments.run(stop))
        try:
            yield (shown := Kept(moments, client))
        finally:
            stop.set()
    assert not shown.processes()


async def test_a_moment_that_takes_too_long_has_failed_and_its_process_is_ended() -> None:
    async with kept(saying(READING), restore_s=SHORT_S) as shown:
        await shown.ask(1.0)
        (moment,) = await shown.until_states("failed")
        assert moment["message"] == "it was not restored within 0.05 s"
        await shown.until_processes(0)
        assert shown.moments.failed_total == 1


async def test_a_moment_that_is_not_used_is_dropped_and_is_no_failure() -> None:
    async with kept(saying(READY), idle_s=SHORT_S) as shown:
        await shown.ask(1.0)
        await shown.until_states()
        await shown.until_processes(0)
        assert shown.moments.failed_total == 0


async def test_its_process_gets_the_log_and_no_other_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVROUTER_CONTROL__TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    async with kept(saying(READY)) as shown:
        await shown.ask(1.0)
        await shown.until_states("ready")
        (process,) = await shown.until_processes(1)
        given = process.environ()
    assert given["KVROUTER_NATS__URL"] == "nats://127.0.0.1:1"
    assert "secret" not in given.values()


async def test_a_moment_in_which_a_ready_process_dies_has_failed_and_its_time_can_be_asked_for_again() -> None:
    async with kept(saying(READING, READY)) as shown:
        first = await shown.ask(1.0)
        await shown.until_states("ready")
        (process,) = await shown.until_processes(1)
        process.kill()
        (dead,) = await shown.until_states("failed")
        assert (dead["id"], dead["message"]) == (first["id"], "its process ended with code -9")
        second = await shown.ask(1.0)
        assert second["id"] != first["id"]
        await shown.until_states("failed", "ready")
        third = await shown.ask(2.0)
        assert [each["id"] for each in await shown.until_states("ready", "ready")] == [second["id"], third["id"]]


async def test_the_reason_of_a_failure_is_the_last_line_that_the_process_said() -> None:
    async with kept(saying(READING, "a line of a log", "indexer: time: found 1", then="exit 2")) as shown:
        await shown.ask(1.0)
        (moment,) = await shown.until_states("failed")
        assert moment["message"] == "time: found 1"


async def test_a_program_that_is_not_there_is_a_failure_with_its_reason() -> None:
    async with kept(("/nonexistent/program",)) as shown:
        await shown.ask(1.0)
        (moment,) = await shown.until_states("failed")
        assert moment["message"].startswith("its process cannot be started: ")


async def test_a_newer_moment_takes_the_place_of_one_that_is_being_read() -> None:
    async with kept(saying(READING)) as shown:
        asked = [await shown.ask(float(at_s)) for at_s in range(1, MOMENTS_MAX + 2)]
        assert [each["id"] for each in await shown.listed()] == [each["id"] for each in asked[1:]]
        await shown.until_processes(MOMENTS_MAX)


async def test_while_dropped_processes_do_not_end_a_further_moment_is_refused() -> None:
    async with kept(saying(READING, then="exec tail -f /dev/null")) as shown:
        for at_s in (1.0, 2.0):
            await shown.ask(at_s)
        while not all(each["progress"] for each in await shown.listed()):
            pass
        for at_s in (3.0, 4.0):
            assert "error" not in await shown.ask(at_s)
        assert (await shown.ask(5.0))["error"]["code"] == "busy"
        for process in await shown.until_processes(PROCESSES_MAX):
            process.kill()
        await shown.until_states("failed", "failed")
        assert (await shown.ask(5.0))["state"] == "reading"


async def test_without_a_place_for_its_socket_a_moment_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    async with kept(saying(READY)) as shown:
        error = (await shown.ask(1.0))["error"]
        assert (error["code"], "missing" in error["message"]) == ("no_directory", True)
        assert await shown.listed() == []


def in_it(directory: Path) -> list[tuple[str, int]]:
    """Return names and modes."""
    return [(each.name, each.stat().st_mode & 0o777) for each in directory.iterdir()]


async def test_moments_have_a_directory_from_the_first_on_and_leave_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with kept(saying(READY)) as shown:
        assert in_it(tmp_path) == []
        await shown.ask(1.0)
        ((name, mode),) = in_it(tmp_path)
        assert (name.startswith("kv-router-moments-"), mode) == (True, 0o700)
    assert in_it(tmp_path) == []
