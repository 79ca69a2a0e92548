"""A live index held against the mirrors, on a real log and over HTTP: equal while all goes on, and every difference."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import NamedTuple

import pytest

from indexer.commands.http import index_app
from indexer.embedded import EmbeddedIndex
from indexer.service.difference import RankVerdict
from indexer.service.index_client import IndexClient
from indexer.service.verification import LISTEN_S, Mirrors, MirrorSilent, fleet_slugs, verdicts
from kv_protocol import fleet, recovery, subjects
from kv_protocol.fleet import WorkerLeft
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from kv_runtime.clock import Clock
from kv_runtime.config.sections import IndexSection
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.telemetry import new_registry
from tests.dumped import dump_chunks
from tests.support.manual_clock import ManualClock
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.index_on_log import Index, running_index
from tests.system.integration.scripted_rank import MODEL, ScriptedRank, ToldWorker
from tests.system.integration.serving import serving
from tests.unit.router.samples import registered

SLUG = subjects.model_slug(MODEL)
TIMEOUT_S = 0.4


class Verified(NamedTuple):
    """An index over HTTP, and the log on which its mirrors are asked."""

    url: str
    log: EventLog

    async def verdicts(self, *ranks: WorkerRank, timeout_s: float = TIMEOUT_S) -> list[RankVerdict]:
        mirrors = Mirrors(self.log, timeout_s)
        await mirrors.start()
        async with IndexClient(self.url, token="", timeout_s=5.0) as client:
            slugs = dict.fromkeys(ranks, SLUG)
            found = verdicts(client, mirrors, Clock(), slugs, timeout_s=timeout_s, examples_max=3)
            return [verdict async for verdict in found]

    async def verdict(self, rank: WorkerRank, timeout_s: float = TIMEOUT_S) -> RankVerdict:
        (found,) = await self.verdicts(rank, timeout_s=timeout_s)
        return found


@asynccontextmanager
async def served(index: EmbeddedIndex, log: EventLog, token: str = "") -> AsyncIterator[Verified]:
    async with serving(index_app(index, new_registry(), token=token)) as api:
        yield Verified(api.url, log)


@asynccontextmanager
async def scripted_rank(log: EventLog, index: Index, *hashes: int) -> AsyncIterator[ScriptedRank]:
    """A rank that holds these blocks, of which the index knows."""
    scripted = ScriptedRank(log)
    await scripted.start()
    await scripted.store(*hashes)
    await index.until_at(scripted)
    yield scripted


async def until_at(index: Index, *workers: ToldWorker) -> None:
    async with asyncio.timeout(10):
        for each in workers:
            for rank in each.ranks:
                await index.index.wait_for(rank, *each.position(rank))


async def living(log: EventLog, index: Index) -> list[ToldWorker]:
    """Return two workers that the index has caught up with."""
    random = Random(1)
    told = [ToldWorker(log, f"w{at}", random) for at in range(2)]
    for each in told:
        await each.beat()
        for rank in each.ranks:
            await each.flush(rank, 60)
    await until_at(index, *told)
    return told


def ranks_of(workers: list[ToldWorker]) -> list[WorkerRank]:
    return [rank for worker in workers for rank in worker.ranks]


# ---------------------------------------------------------------- equal


async def test_a_fleet_that_goes_on_meanwhile_is_verified_again_and_again(broker: Broker, log: EventLog) -> None:
    async with running_index(broker.url) as index, served(index.index, log) as verified:
        workers = await living(log, index)
        stop = asyncio.Event()

        async def go_on() -> None:
            random = Random(2)
            while not stop.is_set():
                worker = random.choice(workers)
                await worker.flush(random.choice(worker.ranks))

        for worker in workers:
            await worker.answer_all()
        async with asyncio.TaskGroup() as group:
            going_on = group.create_task(go_on())
            found = [each for _ in range(20) for each in await verified.verdicts(*ranks_of(workers), timeout_s=5.0)]
            assert not going_on.done()
            stop.set()
    assert [(f"{each.worker_id}/{each.dp_rank}", each.verdict) for each in found[:4]] == [
        (rank, "equal") for rank in ("w0/0", "w0/1", "w1/0", "w1/1")
    ]
    assert {each.verdict for each in found} == {"equal"}
    assert max(sum(each.blocks.values()) for each in found) > 10
    assert len({each.mirror_seq for each in found}) > 20


# ---------------------------------------------------------------- different


async def test_blocks_that_are_missing_or_surplus_in_the_index_are_named(broker: Broker, log: EventLog) -> None:
    async with (
        running_index(broker.url) as index,
        served(index.index, log) as verified,
        scripted_rank(log, index, 1, 2, 3) as scripted,
    ):
        assert (await verified.verdict(scripted.rank)).verdict == "equal"
        scripted.blocks = {1: None, 2: 1, 8: 2, 9: 8}
        found = await verified.verdict(scripted.rank)
    assert (found.verdict, found.counts) == ("differs", {"missing": 2, "surplus": 1})
    assert [(each.kind, each.sequence_hash, each.parent) for each in found.examples] == [
        ("missing", 8, 2),
        ("missing", 9, 8),
        ("surplus", 3, 2),
    ]


@pytest.mark.parametrize("listens", [True, False])
async def test_a_mirror_that_does_not_answer_is_a_difference(broker: Broker, log: EventLog, listens: bool) -> None:
    async with running_index(broker.url) as index, served(index.index, log) as verified:
        scripted = ScriptedRank(log)
        if listens:
            await scripted.start()
            scripted.may_answer.clear()
        await scripted.store(1)
        await index.until_at(scripted)
        assert (await verified.verdict(scripted.rank)).verdict == "unanswered"
        (found,) = await verified.verdicts()  # without the rank's slug its mirror cannot be asked
        assert (found.verdict, found.reason) == ("unanswered", "its mirror does not answer")
        scripted.may_answer.set()


async def test_a_rank_known_to_its_mirror_only_is_a_difference_and_an_unknown_rank_is_not(log: EventLog) -> None:
    unread = EmbeddedIndex(IndexSection(), log, Clock())
    async with served(unread, log) as verified:
        scripted = ScriptedRank(log)
        await scripted.start()
        (found,) = await verified.verdicts(scripted.rank, WorkerRank("dead", 0))
        assert (found.worker_id, found.verdict, found.reason) == ("w0", "unknown", "the index does not know it")


# ---------------------------------------------------------------- mirrors


async def test_what_is_no_answer_is_said(log: EventLog) -> None:
    mirrors = Mirrors(log, 0.2)
    await mirrors.start()
    rank = WorkerRank("w0", 0)
    with pytest.raises(MirrorSilent, match="w0/0: no mirror listens"):
        await mirrors.state(SLUG, rank)

    async def nonsense(message: LogMessage) -> None:
        await log.announce(message.reply, b"nonsense")

    await log.listen(subjects.recover(MODEL, rank), nonsense)
    with pytest.raises(MirrorSilent, match="w0/0: malformed at byte 0: answer"):
        await mirrors.state(SLUG, rank)

    async def half(message: LogMessage) -> None:
        request = recovery.decode_recover_request(message.data)
        rows = [HeldBlock(block, None, 1) for block in range(4)]
        first, *_ = dump_chunks(request.request_id, 7, 1, rows, chunk_blocks=2)
        await log.announce(message.reply, recovery.encode(first))

    await log.listen(subjects.recover(MODEL, WorkerRank("w1", 0)), half)
    with pytest.raises(MirrorSilent, match=r"w1/0: 1 parts of an answer, and then 0\.2 s none"):
        await mirrors.state(SLUG, WorkerRank("w1", 0))


# ---------------------------------------------------------------- which ranks are there


async def called(log: EventLog, *beating: ScriptedRank) -> Mapping[WorkerRank, str]:
    clock, heard = ManualClock(), list[LogMessage]()

    async def hear(message: LogMessage) -> None:
        if message.data != b"nonsense":
            heard.append(message)

    async with asyncio.TaskGroup() as group:
        calling = group.create_task(fleet_slugs(log, clock, FleetGate(), 5.0))
        await eventually(lambda: clock.sleepers)
        await log.listen(subjects.HEARTBEAT_ALL, hear)  # after the call's own listener
        for each in beating:
            await each.beat()
        await eventually(lambda: len(heard) == len(beating))
        while not calling.done():
            await clock.advance(LISTEN_S)
    return calling.result()


async def test_registered_workers_and_workers_with_heartbeats_are_expected_and_left_ones_are_not(log: EventLog) -> None:
    for event in (
        registered("w1", model=MODEL, dp_ranks=(0, 1)),
        registered("w2", model=MODEL),
        WorkerLeft(worker_id="w2", instance="w2-1"),
    ):
        await log.publish(subjects.fleet(MODEL, event.worker_id), fleet.encode(event))
    await log.publish("kv.v1.fleet.m.w3", b"nonsense")
    await log.announce("kv.v1.heartbeat.m.W3.x", b"nonsense")
    found = await called(log, ScriptedRank(log, "w4", 7))
    assert found == dict.fromkeys([WorkerRank("w1", 0), WorkerRank("w1", 1), WorkerRank("w4", 7)], SLUG)
