"""`router replay` and `router journal tail` as they are typed, on a real log."""

import asyncio
import json
import os
import re
import sys
from typing import NamedTuple

import pytest

from kv_runtime.event_log import EventLog
from router.core.recording import Recordable
from tests.integration.broker import Broker, eventually
from tests.integration.test_journal import written
from tests.properties.router_life import POLICIES, Life

NOBODY = "nats://127.0.0.1:1"
_REPLAY = "from router.commands.replay import replay; replay(prog_name='router replay')"
_TAIL = "from router.commands.journal import tail; tail(prog_name='router journal tail')"


class Ended(NamedTuple):
    code: int | None
    out: str
    err: str


async def typed(command: str, *arguments: str) -> Ended:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert "Traceback" not in err.decode(), err.decode()
    return Ended(process.returncode, out.decode(), err.decode())


async def lived(seed: int = 1, policy: str = "kv") -> list[Recordable]:
    life = Life(seed, POLICIES[policy])
    await life.run()
    return life.shelf.told


async def write(log: EventLog, told: list[Recordable], router: str = "router-1") -> None:
    async with written(log, router=router) as writer:
        for what in told:
            writer.record(what)
        await eventually(lambda: not writer.statistics().waiting)


@pytest.mark.asyncio
async def test_a_journal_replays_and_says_what_another_policy_would_have_done(broker: Broker, log: EventLog) -> None:
    await write(log, await lived())
    same = await typed(_REPLAY, "--nats-url", broker.url)
    assert (same.code, same.err) == (0, "")
    assert re.search(r"^journals +router-1$", same.out, re.MULTILINE)
    assert re.search(r"^equal +[1-9]\d+ decisions, bit for bit$", same.out, re.MULTILINE)
    assert re.search(r"^different +0$", same.out, re.MULTILINE)
    assert "otherwise" not in same.out
    other = await typed(_REPLAY, "--nats-url", broker.url, "--mode", "random")
    assert other.code == 0
    assert re.search(r"^otherwise +[1-9]\d* of [1-9]\d+ would have gone elsewhere \(\d", other.out, re.MULTILINE)
    weighed = await typed(_REPLAY, "--nats-url", broker.url, "--set", "policy.history_weight=9")
    assert "otherwise" in weighed.out


@pytest.mark.asyncio
async def test_a_journal_that_lacks_what_was_applied_ends_with_1_and_says_what_differs(
    broker: Broker, log: EventLog
) -> None:
    told = [what for what in await lived() if type(what).__name__ != "LedgerApplied"]
    await write(log, told)
    found = await typed(_REPLAY, "--nats-url", broker.url, "--router", "router-1")
    assert found.code == 1
    assert re.search(r"^router-1 d\d+\+*: .*now .*, recorded ", found.out, re.MULTILINE)


@pytest.mark.asyncio
async def test_what_cannot_be_done_ends_with_2_and_a_line_that_says_why(broker: Broker, log: EventLog) -> None:
    assert (await typed(_REPLAY, "--nats-url", NOBODY)).code == 2
    without = await typed(_REPLAY)
    assert (without.code, "nats.url: found none" in without.err) == (2, True)
    nothing = await typed(_REPLAY, "--nats-url", broker.url)
    assert nothing.code == 2
    await write(log, [])
    unknown = await typed(_REPLAY, "--nats-url", broker.url, "--router", "nobody")
    assert (unknown.code, unknown.err) == (2, "router: --router: found no journal of nobody on the log\n")


@pytest.mark.asyncio
async def test_the_tail_shows_every_kind_of_record_as_a_line_or_as_an_object(broker: Broker, log: EventLog) -> None:
    await write(log, await lived())
    lines = await typed(_TAIL, "--nats-url", broker.url, "--all", "--limit", "400")
    assert (lines.code, len(lines.out.splitlines())) == (0, 400)
    assert re.search(r" decided +d\d+: \d+ tokens for [mn] to w\d/[01], kv by \w+", lines.out)
    objects = await typed(_TAIL, "--nats-url", broker.url, "--all", "--limit", "400", "--json")
    found = [json.loads(line) for line in objects.out.splitlines()]
    assert len(found) == 400
    assert {each["kind"] for each in found} >= {"began", "policy", "fleet", "heard", "decided", "outcome", "tick"}
    assert {each["router"] for each in found} == {"router-1"}
