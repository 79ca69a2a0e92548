"""A user's own mode that raises fails its own request, at whatever moment; the router and other requests go on."""

import asyncio
import json
import sys
from pathlib import Path

from tests.system.faults.own_modes import UNLUCKY
from tests.system.faults.small_fleet import running

MODE = "tests.system.faults.own_modes:first"
_OWN = (f'policy.user_modes=["{MODE}"]',)
_SLOW = ("engine.speed=0.05",)


async def test_a_request_that_waits_and_cannot_be_placed_is_told_so_and_the_others_go_on(tmp_path: Path) -> None:
    async with running(tmp_path, 1, (*_OWN, "queue.threshold=0"), _SLOW) as fleet, asyncio.TaskGroup() as group:
        first = group.create_task(fleet.answer("x" * 2000))
        await fleet.until("ledger_active_requests", 1)
        unlucky = group.create_task(fleet.answer("y", priority=UNLUCKY))
        await fleet.until("queued_requests", 1)
        other = group.create_task(fleet.answer("z"))
        await fleet.until("queued_requests", 2)
        assert await fleet.choose_by(MODE) == 200
        answers = await asyncio.gather(first, unlucky, other)
        assert [status for status, _ in answers] == [200, 500, 200]
        await fleet.until("inflight_requests", 0)
        await fleet.until("ledger_active_requests", 0)


async def test_a_request_that_cannot_be_placed_a_second_time_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path, 2, _OWN, _SLOW) as fleet:
        assert await fleet.choose_by(MODE) == 200
        await fleet.workers[0].kill()
        status, body = await fleet.answer("x")
        assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
        await fleet.until("inflight_requests", 0)


async def test_decisions_of_a_mode_that_replay_does_not_know_are_not_called_different(tmp_path: Path) -> None:
    async with running(tmp_path, 1, _OWN, _SLOW) as fleet:
        assert await fleet.choose_by(MODE) == 200
        assert (await fleet.answer("x"))[0] == 200
        await fleet.until("journal_unpublished_records", 0)
        command = ("-m", "router", "replay", "--nats-url", fleet.nats_url)
        replay = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await replay.communicate()
        assert b"different      0" in said, said.decode()
        assert b"not exact      1" in said, said.decode()
