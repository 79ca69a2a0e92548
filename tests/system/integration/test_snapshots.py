"""Snapshots on a real log: a cold start goes on where one ends, and the log lets go of nothing that none covers."""

import asyncio
import re

import nats
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from indexer.commands.http import index_app
from indexer.embedded import EmbeddedIndex
from indexer.follow.checkpoint import decode_checkpoint, encode_checkpoint
from indexer.follow.fold import RankView
from indexer.service import snapshots
from indexer.service.retention import SnapshotName
from kv_protocol import subjects
from kv_runtime.config.sections import IndexSection
from kv_runtime.event_log import EventLog, ObjectBucket, bucket_spec
from kv_runtime.telemetry import new_registry
from tests.support.manual_clock import ManualClock
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.index_on_log import NATS, WAIT_S, Index, gpu, running_index
from tests.system.integration.scripted_rank import ScriptedRank
from tests.system.integration.serving import serving

OFTEN = NATS.model_copy(update={"snapshot_period_s": 1.0})
"""A keeper that writes as soon as there is something new; by the test's clock no rank falls silent meanwhile."""


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LOOK_S", 0.1)
    monkeypatch.setattr(snapshots, "OFF_S", 2.0)


@pytest.fixture
def bucket(log: EventLog) -> ObjectBucket:
    return log.objects(subjects.SNAPSHOT_BUCKET)


def metric(index: Index, name: str) -> float:
    found = re.search(rf"^kvrouter_{name} (\S+)$", index.metrics(), re.MULTILINE)
    assert found, f"no kvrouter_{name}"
    return float(found[1])


async def until(index: Index, name: str, value: float) -> None:
    """Let the index's clock go on until the metric has the value."""
    async with asyncio.timeout(WAIT_S):
        while metric(index, name) != value:
            await index.clock.advance(0.1)
            await asyncio.sleep(0.002)


async def store_chain(scripted: ScriptedRank, first: int, last: int) -> None:
    for block in range(first, last + 1):
        await scripted.store(block, parent=block - 1 or None)


async def purge_all(log: EventLog) -> None:
    """Nothing is in the log any more: what an index knows afterwards is not from there."""
    await log.purge(subjects.EVENTS_STREAM, (await log.stream_state(subjects.EVENTS_STREAM)).last_seq)


# ---------------------------------------------------------------- a cold start


async def test_an_index_that_starts_goes_on_where_the_newest_snapshot_ends(
    broker: Broker, log: EventLog, scripted: ScriptedRank
) -> None:
    await store_chain(scripted, 1, 20)
    async with running_index(broker.url, nats=OFTEN) as first:
        await first.until_at(scripted)
        await until(first, "snapshots_written_total", 1)
        assert metric(first, "snapshot_seq") == 20
        assert metric(first, "snapshot_bytes") > 0
    await purge_all(log)
    await store_chain(scripted, 21, 22)
    async with running_index(broker.url, nats=OFTEN) as second:
        await second.until_at(scripted)
        assert second.view(scripted.rank, *range(1, 23)) == RankView(gpu(22), 7, 22, "")
        await scripted.beat()
        await scripted.store(23, parent=22)
        await second.until_at(scripted)
        assert sorted(second.index.held(scripted.rank)) == sorted(scripted.held())
        assert (second.happened("gaps", scripted.rank), scripted.dumps_asked) == (0, 0)
        assert second.happened("duplicates", scripted.rank) == 0


@pytest.mark.parametrize("damage", ["bytes", "chunks", "words", "place"])
async def test_a_snapshot_that_cannot_be_read_is_said_and_the_one_before_serves(
    broker: Broker, log: EventLog, scripted: ScriptedRank, bucket: ObjectBucket, damage: str
) -> None:
    await store_chain(scripted, 1, 5)
    async with running_index(broker.url, nats=OFTEN) as first:
        await first.until_at(scripted)
        await until(first, "snapshots_written_total", 1)
    (good,) = await bucket.names()
    data = await bucket.get(good)
    bad = str(SnapshotName(5, 10**18))
    if damage == "bytes":
        await bucket.put(bad, data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "words":
        await bucket.put(bad, b"no snapshot")
    elif damage == "place":  # what was purged by such a name would not be covered
        await bucket.put(bad, encode_checkpoint(structs.replace(decode_checkpoint(data), stream_seq=3)))
    else:
        await bucket.put(bad, data)
        client = await nats.connect(broker.url)
        last = (await client.jsm().stream_info(f"OBJ_{subjects.SNAPSHOT_BUCKET}")).state.last_seq
        await client.jsm().delete_msg(f"OBJ_{subjects.SNAPSHOT_BUCKET}", last - 1)
        await client.close()
    await purge_all(log)
    with capture_logs() as lines:
        async with running_index(broker.url, nats=OFTEN) as second:
            assert second.view(scripted.rank, *range(1, 6)).overlap_blocks == gpu(5)
            assert metric(second, "snapshots_refused_total") == 1
    told = [line["name"] for line in lines if line["event"] == "snapshot_refused"]
    assert told == [bad]
    assert [line["name"] for line in lines if line["event"] == "snapshot_restored"] == [good]


async def test_until_it_has_caught_up_an_index_is_not_ready_and_says_how_far_it_is(
    broker: Broker, scripted: ScriptedRank
) -> None:
    log = await EventLog.connect(broker.url, name="index")
    index = EmbeddedIndex(IndexSection(), log, ManualClock(), OFTEN)
    async with serving(index_app(index, new_registry(), token="")) as api:
        await store_chain(scripted, 1, 5)
        assert index.catching_up() == "log: not read yet"
        status, body = await api.get("/ready")
        assert (status, body["ready"], body["catching_up"]) == (503, False, "log: not read yet")
        await index.start()
        assert index.catching_up() == "log: 0 of 5 messages read"
        await eventually(lambda: not index.catching_up())
        assert (await api.get("/ready"))[0] == 200
        await store_chain(scripted, 6, 7)
        assert index.catching_up() == ""
    await log.close()


# ---------------------------------------------------------------- writing


async def test_of_several_indexes_on_one_log_one_writes(broker: Broker, scripted: ScriptedRank) -> None:
    await scripted.store(1)
    async with running_index(broker.url, nats=OFTEN) as one:
        await until(one, "snapshots_written_total", 1)
        async with running_index(broker.url, nats=OFTEN) as other:
            await until(other, "snapshot_seq", 1)
            await scripted.store(2)
            await scripted.beat()
            await one.until_at(scripted)
            await other.until_at(scripted)
            await until(one, "snapshots_written_total", 2)
            await until(other, "snapshot_seq", 2)
            await other.pass_time(0.5)
            assert metric(other, "snapshots_written_total") == 0


async def test_where_there_is_no_room_the_oldest_snapshot_is_given_up_and_the_newest_is_not(
    broker: Broker, bucket: ObjectBucket, scripted: ScriptedRank
) -> None:
    narrow = OFTEN.model_copy(update={"snapshots_bytes_max": 1 << 20})
    async with running_index(broker.url, nats=narrow) as index:
        await index.log.ensure_stream(bucket_spec(subjects.SNAPSHOT_BUCKET, replicas=1, max_bytes=1 << 20))
        for round_ in range(1, 5):
            await scripted.store(*range(round_ * 100_000, round_ * 100_000 + 16_000))
            await index.until_at(scripted)
            await scripted.beat()
            await until(index, "snapshots_written_total", round_)
        assert [int(name[:20]) for name in await bucket.names()] == [3, 4]
        with capture_logs() as lines:
            await scripted.store(*range(10**6, 10**6 + 16_000))
            await index.until_at(scripted)
            await scripted.beat()
            await until(index, "snapshot_failures_total", 1)
        assert [int(name[:20]) for name in await bucket.names()] == [3, 4]
    (told,) = [line["reason"] for line in lines if line["event"] == "snapshot_failed"]
    assert re.fullmatch(r"nats\.snapshots_bytes_max: found 1048576, allowed \d+ and more", told)


# ---------------------------------------------------------------- the log's bounds


async def test_the_log_is_purged_before_its_limit_and_only_up_to_what_a_snapshot_covers(
    broker: Broker, log: EventLog, scripted: ScriptedRank, bucket: ObjectBucket
) -> None:
    tight = OFTEN.model_copy(update={"events_max_bytes": 1 << 20})
    async with running_index(broker.url, nats=tight) as index:
        for round_ in range(1, 12):
            await scripted.store(*range(round_ * 100_000, round_ * 100_000 + 10_000))
            await scripted.beat()
            await index.until_at(scripted)
            await until(index, "snapshot_seq", round_)
            await until(index, "log_bytes", (await log.stream_state(subjects.EVENTS_STREAM)).bytes)
        state = await log.stream_state(subjects.EVENTS_STREAM)
        purged = metric(index, "log_purged_seq")
        assert purged > 0
        assert state.first_seq == purged + 1
        assert state.bytes <= 0.75 * (1 << 20)
        async with asyncio.timeout(WAIT_S):
            while min(covered := [int(name[:20]) for name in await bucket.names()]) < purged:
                await index.clock.advance(0.1)
        assert covered[0] == purged
    async with running_index(broker.url, nats=tight) as second:
        await second.until_at(scripted)
        assert scripted.dumps_asked == 0
        assert sorted(second.index.held(scripted.rank)) == sorted(scripted.held())
