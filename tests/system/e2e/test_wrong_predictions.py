"""Workers that are wrong and do not say so are found by what requests show, and every place says so with evidence.

All are real processes: a router, a right worker, and one with a planted fault (`faulty_worker.py`).
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from kv_protocol.journal import TrustMoved
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from router.journal.log import JournalEntry, read_journal
from tests.system.e2e.client import MODEL, Client, fleet_of
from tests.system.e2e.conftest import FAST_WORKER

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]

FOUND_WITHIN = 200
"""Requests that reach the faulty worker until the router doubts it."""
FAULTY, RIGHT = "faulty", "w0"
WAIT_S = 60.0
FAMILIES = 3
"""Chats that come again and again."""


class Doubtful:
    """A fleet with a faulty worker."""

    def __init__(self, fleet: FleetProcesses, client: Client) -> None:
        self.fleet, self.client = fleet, client
        self._sent = 0

    async def ask(self, worker: str) -> None:
        """Send the next chat to a worker, and return once the index knows of it."""
        family = self._sent % FAMILIES
        self._sent += 1
        messages = [{"role": "user", "content": f"{family} and so on, " * 12}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        answer = await self.client.post("/v1/chat/completions", body, {"x-worker-instance-id": worker})
        assert (answer.status, answer.worker) == (200, worker)
        await self.client.until_index_has(worker)

    async def ranks(self) -> dict[str, Any]:
        """Return each worker's rank, as `/v1/workers` shows it."""
        workers = (await self.client.control("/v1/workers"))["workers"]
        return {worker["registration"]["worker_id"]: worker["ranks"][0] for worker in workers}

    async def until_doubted(self) -> int:
        """Ask both workers in turn until the faulty one is doubted; return how many requests it got."""
        for asked in range(1, FOUND_WITHIN + 1):
            await self.ask(RIGHT)
            await self.ask(FAULTY)
            if (await self.ranks())[FAULTY]["evidence"] is not None:
                return asked
        raise AssertionError(f"not found: {(await self.ranks())[FAULTY]}")

    async def moved(self) -> list[TrustMoved]:
        """Return the records of trust in the journal, once one of the faulty worker is there."""
        log = await EventLog.connect(self.fleet.nats_url, name="test")
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group, asyncio.timeout(WAIT_S):
            group.create_task(log.run(stop))
            moved = list[TrustMoved]()

            def take(entry: JournalEntry) -> None:
                moved.extend(each for each in entry.message.records if isinstance(each, TrustMoved))

            while not any(each.worker_id == FAULTY and each.requests for each in moved):
                moved.clear()
                await read_journal(log, "", take, asyncio.Event())
            stop.set()
        await log.close()
        return moved


@asynccontextmanager
async def doubtful(fault: str) -> AsyncIterator[Doubtful]:
    """Yield a fleet with that fault."""
    async with fleet_of(FleetShape(workers=1, worker_settings=FAST_WORKER)) as (fleet, client):
        module = ("-m", "tests.system.e2e.faulty_worker", fault, "serve", "--worker-id", FAULTY)
        command = [sys.executable, *module, "--nats-url", fleet.nats_url, "--model", MODEL]
        for setting in FAST_WORKER:
            command += ["--set", setting]
        worker = ChildProcess(FAULTY, command)
        await fleet.add_worker(worker)
        fleet.worker_urls[FAULTY] = (await worker.line_with(f"worker {FAULTY} on")).split()[3]
        await fleet.until_ready()
        found = Doubtful(fleet, client)
        async with asyncio.timeout(WAIT_S):
            while FAULTY not in await found.ranks():
                await Clock().sleep(0.05)
        yield found


@pytest.mark.parametrize(
    ("fault", "doubt", "trust"), [("lying", "overpredicted", "DEGRADED"), ("template", "underpredicted", "FALLBACK")]
)
async def test_a_faulty_worker_is_found_and_every_place_says_so_with_evidence(
    fault: str, doubt: str, trust: str
) -> None:
    async with doubtful(fault) as found:
        assert await found.until_doubted() <= FOUND_WITHIN
        ranks = await found.ranks()
        evidence = ranks[FAULTY]["evidence"]
        assert (ranks[FAULTY]["trust"], evidence["doubt"]) == (trust, doubt)
        assert evidence[doubt] * 2 >= evidence["requests"] >= 16
        assert (ranks[RIGHT]["trust"], ranks[RIGHT]["evidence"]) == ("EXACT", None)
        logged = json.loads(await found.fleet.router.line_with("predictions_doubted"))
        assert (logged["worker"], logged["dp_rank"]) == (FAULTY, 0)
        assert {name: logged[name] for name in evidence} == evidence
        shown = await found.client.scrape()
        assert shown.total("predictions_doubted_total", doubt=doubt) == 1
        assert shown.total("rank_trust", dp_rank="0", trust=trust, worker=FAULTY) == 1
        (record,) = [each for each in await found.moved() if each.worker_id == FAULTY and each.requests]
        assert (record.trust, record.was, record.reason.partition(";")[0]) == (trust, "EXACT", doubt)
        assert record.newest_decision == evidence["newest_decision"]
        assert (record.requests, getattr(record, doubt)) == (evidence["requests"], evidence[doubt])
