"""Snapshots on a real log: a cold start goes on where one ends, and the log lets go of nothing that none covers."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
import pytest_asyncio
from msgspec import structs
from structlog.testing import capture_logs

from indexer.embedded import EmbeddedIndex, ensure_streams
from indexer.follow.checkpoint import decode_checkpoint, encode_checkpoint
from indexer.follow.fold import RankView
from indexer.service import snapshot_keeper as keeper
from indexer.service.http import IndexApi
from indexer.service.retention import SnapshotName
from kv_protocol import subjects
from kv_runtime.clock import ManualClock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog, ObjectBucket, reading
from kv_runtime.telemetry import new_registry
from tests.system.integration.broker import Broker, eventually, running_broker
from tests.system.integration.index_on_log import NATS, WAIT_S, Index, gpu, running_index
from tests.system.integration.scripted_rank import ScriptedRank
from tests.system.integration.serving import serving

OFTEN = NATS.model_copy(update={"snapshot_period_s": 1.0})
"""A keeper that writes as soon as there is something new; by the test's clock no rank falls silent meanwhile."""


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.1)
    monkeypatch.setattr(keeper, "OFF_S", 2.0)


@pytest.fixture
def bucket(log: EventLog) -> ObjectBucket:
    return log.objects(subjects.SNAPSHOT_BUCKET)


@pytest_asyncio.fixture
async def scripted(log: EventLog) -> ScriptedRank:
    scripted = ScriptedRank(log)
    await scripted.start()
    return scripted


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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_snapshot_outlives_a_server_that_is_killed(
    broker: Broker, log: EventLog, scripted: ScriptedRank
) -> None:
    await store_chain(scripted, 1, 5)
    async with running_index(broker.url, nats=OFTEN) as first:
        await first.until_at(scripted)
        await until(first, "snapshots_written_total", 1)
    await purge_all(log)
    await broker.kill()
    await broker.start()
    await eventually(lambda: log.is_connected)
    async with running_index(broker.url, nats=OFTEN) as second:
        assert second.view(scripted.rank, *range(1, 6)).overlap_blocks == gpu(5)


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_snapshot_of_another_log_is_not_used(
    broker: Broker, scripted: ScriptedRank, bucket: ObjectBucket
) -> None:
    await store_chain(scripted, 1, 5)
    async with running_index(broker.url, nats=OFTEN) as first:
        await first.until_at(scripted)
        await until(first, "snapshots_written_total", 1)
    client = await nats.connect(broker.url)
    await client.jsm().delete_stream(subjects.EVENTS_STREAM)
    await client.close()
    other = ScriptedRank(scripted.log, "w1")
    await other.start()
    await ensure_streams(other.log, OFTEN)
    await store_chain(other, 1, 6)
    async with running_index(broker.url, nats=OFTEN) as second:
        await second.until_at(other)
        assert second.index.ranks() == [other.rank]
        assert metric(second, "snapshots_refused_total") == 0
        await until(second, "snapshots_written_total", 1)
    assert len(await bucket.names()) == 2


@pytest.mark.asyncio
async def test_a_snapshot_for_which_the_index_has_no_memory_is_refused_and_the_log_is_read(
    broker: Broker, scripted: ScriptedRank
) -> None:
    await scripted.store(*range(1, 20_001))
    async with running_index(broker.url, nats=OFTEN) as first:
        await first.until_at(scripted)
        await until(first, "snapshots_written_total", 1)
    small = IndexSection(implementation="python", memory_bytes_max=1 << 20)
    async with running_index(broker.url, settings=small, nats=OFTEN) as second:
        await eventually(lambda: second.view(scripted.rank).seq == 1)
        assert metric(second, "snapshots_refused_total") == 1
        assert metric(second, "index_overfull_ranks") == 1


@pytest.mark.asyncio
async def test_without_a_bucket_an_index_starts_and_reads_all_of_the_log(
    broker: Broker, scripted: ScriptedRank
) -> None:
    await store_chain(scripted, 1, 5)
    client = await nats.connect(broker.url)
    await client.jsm().delete_stream(f"OBJ_{subjects.SNAPSHOT_BUCKET}")
    await client.close()
    async with started(broker.url) as index:
        await eventually(lambda: index.overlap(range(1, 6), [scripted.rank])[0].overlap_blocks == gpu(5))


@asynccontextmanager
async def started(url: str) -> AsyncIterator[EmbeddedIndex]:
    """Start an index on streams that are there, and let nothing of it run."""
    log = await EventLog.connect(url, name="index")
    index = EmbeddedIndex(IndexSection(), log, ManualClock(), OFTEN)
    try:
        await index.start()
        yield index
    finally:
        await log.close()


@pytest.mark.asyncio
async def test_an_index_in_a_router_leaves_the_lines_of_refused_fleet_events_to_the_router(
    broker: Broker, scripted: ScriptedRank
) -> None:
    await store_chain(scripted, 1, 1)  # the streams are there
    log = await EventLog.connect(broker.url, name="index")
    silent = EmbeddedIndex(IndexSection(), log, ManualClock(), OFTEN, logs_announced=False)
    speaking = EmbeddedIndex(IndexSection(), log, ManualClock(), OFTEN)
    assert await lines_of_a_refused_event(log, silent) == 0
    assert await lines_of_a_refused_event(log, speaking) > 0
    await log.close()


async def lines_of_a_refused_event(log: EventLog, index: EmbeddedIndex) -> int:
    """Start the index, publish a fleet event that cannot be read, and return how many lines the log has of it."""
    with capture_logs() as logs:
        await index.start()
        before = refused_events(index)
        await log.publish(subjects.fleet("m", "w0"), b"nonsense")
        await eventually(lambda: refused_events(index) > before)
    return sum(line["event"] == "fleet_event_refused" for line in logs)


def refused_events(index: EmbeddedIndex) -> float:
    found = next(each for each in index.families() if each.name == "kvrouter_index_fleet_refused")
    return sum(sample.value for sample in found.samples)


@pytest.mark.asyncio
async def test_until_it_has_caught_up_an_index_is_not_ready_and_says_how_far_it_is(
    broker: Broker, scripted: ScriptedRank
) -> None:
    log = await EventLog.connect(broker.url, name="index")
    index = EmbeddedIndex(IndexSection(), log, ManualClock(), OFTEN)
    async with serving(IndexApi(index).app(new_registry(), token="")) as api:
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


@pytest.mark.asyncio
async def test_what_the_log_loses_while_it_is_caught_up_with_is_not_waited_for(
    broker: Broker, log: EventLog, scripted: ScriptedRank
) -> None:
    await store_chain(scripted, 1, 5)
    async with running_index(broker.url, nats=OFTEN) as first:
        await first.until_at(scripted)
        await until(first, "snapshots_written_total", 1)
    await store_chain(scripted, 6, 7)
    await purge_all(log)
    async with started(broker.url) as index:
        assert index.catching_up() == ""


# ---------------------------------------------------------------- writing


@pytest.mark.asyncio
async def test_snapshots_are_written_while_the_log_grows_and_only_then(
    broker: Broker, scripted: ScriptedRank, bucket: ObjectBucket
) -> None:
    async with running_index(broker.url, nats=OFTEN) as index:
        await index.pass_time(1.0)
        assert await bucket.names() == []
        for block in range(1, 4):
            await scripted.store(block)
            await scripted.beat()
            await index.until_at(scripted)
            await until(index, "snapshots_written_total", block)
        await index.pass_time(3.0)
        assert metric(index, "snapshots_written_total") == 3
        assert [int(name[:20]) for name in await bucket.names()] == [1, 2, 3]
        assert metric(index, "snapshot_age_seconds") >= 3.0
        assert metric(index, "snapshot_failures_total") == 0


@pytest.mark.asyncio
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


def is_off_log(index: Index, scripted: ScriptedRank) -> bool:
    """Return whether the index has of a rank what the log has not."""
    stream = index.index.statistics().streams[scripted.rank]
    return stream.cursor > stream.logged_seq


@pytest.mark.asyncio
async def test_while_a_rank_is_ahead_of_the_log_a_snapshot_waits_but_not_for_ever(
    broker: Broker, scripted: ScriptedRank
) -> None:
    await scripted.store(1)
    async with running_index(broker.url, nats=OFTEN) as index:
        await until(index, "snapshots_written_total", 1)
        await scripted.store(2, silently=True)
        await scripted.publish_raw(b"garbage")
        await index.until_at(scripted)
        assert is_off_log(index, scripted)
        written_s = index.clock.now()
        while index.clock.now() < written_s + keeper.OFF_S - 0.2:  # it may be seen off the log at once
            await index.clock.advance(0.1)
            await asyncio.sleep(0.002)
        assert metric(index, "snapshots_written_total") == 1
        await scripted.beat()
        await until(index, "snapshots_written_total", 2)
        assert is_off_log(index, scripted)


@pytest.mark.asyncio
async def test_a_failure_is_counted_and_said_once_and_ends_with_its_cause(
    broker: Broker, log: EventLog, scripted: ScriptedRank
) -> None:
    with capture_logs() as lines:
        async with running_index(broker.url, nats=OFTEN) as index:
            client = await nats.connect(broker.url)
            await client.jsm().delete_stream(f"OBJ_{subjects.SNAPSHOT_BUCKET}")
            await client.close()
            await scripted.store(1)
            await index.until_at(scripted)
            await until(index, "snapshot_failures_total", 3)
            await ensure_streams(log, OFTEN)
            await until(index, "snapshots_written_total", 1)
    told = [line["reason"] for line in lines if line["event"] == "snapshot_failed"]
    assert len(told) == 1
    assert told[0].startswith(f"bucket {subjects.SNAPSHOT_BUCKET}: names: ")


@pytest.mark.asyncio
async def test_where_there_is_no_room_the_oldest_snapshot_is_given_up_and_the_newest_is_not(
    broker: Broker, bucket: ObjectBucket, scripted: ScriptedRank
) -> None:
    narrow = OFTEN.model_copy(update={"snapshots_bytes_max": 1 << 20})
    async with running_index(broker.url, nats=narrow) as index:
        await index.log.ensure_bucket(subjects.SNAPSHOT_BUCKET, replicas=1, max_bytes=1 << 20)
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_after_the_log_was_lost_snapshots_are_those_of_the_new_one(
    broker: Broker,
    log: EventLog,
    scripted: ScriptedRank,
    bucket: ObjectBucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(reading, "SILENCE_S", 0.5)
    await store_chain(scripted, 1, 2)
    async with running_index(broker.url, nats=OFTEN) as index:
        await until(index, "snapshots_written_total", 1)
        born = (await log.stream_state(subjects.EVENTS_STREAM)).created
        client = await nats.connect(broker.url)
        await client.jsm().delete_stream(subjects.EVENTS_STREAM)
        await client.close()
        await ensure_streams(log, OFTEN)
        await store_chain(scripted, 3, 4)
        await index.until_at(scripted)
        await until(index, "log_read_anew_total", 1)
        await scripted.beat()
        await until(index, "snapshots_written_total", 2)
    old, new = [decode_checkpoint(await bucket.get(name)) for name in await bucket.names()]
    assert (old.stream_seq, new.stream_seq) == (2, 2)
    assert old.stream_created == born
    assert new.stream_created == (await log.stream_state(subjects.EVENTS_STREAM)).created != born
    async with running_index(broker.url, nats=OFTEN) as second:
        assert second.view(scripted.rank, *range(1, 5)).overlap_blocks == gpu(4)


@pytest.mark.asyncio
async def test_the_log_of_an_embedded_server_has_room_for_all_streams(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "own") as broker:
        log = await EventLog.connect(broker.url, name="test")
        await ensure_streams(log, NatsSection())
        assert (await log.stream_state(subjects.FLEET_STREAM)).last_seq == 0
        await log.close()
