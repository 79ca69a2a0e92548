"""Time travel: what the index was after a message of the log is what all messages up to it, and nothing else, make."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import pytest_asyncio

from indexer.follow.checkpoint import RankState
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import Received, read_message
from indexer.native.index import NativeIndex
from indexer.service import snapshots
from indexer.service.history import AvailableMoment, NotRetained, moment_at, seq_at, time_text
from indexer.service.retention import SnapshotName
from kv_protocol import subjects
from kv_protocol.digest import TierDigest
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import eventually, running_broker
from tests.system.integration.event_path import connected
from tests.system.integration.index_on_log import NATS, Index, index_at, running_index
from tests.system.integration.scripted_rank import ToldWorker

SEED = 20_260_101
MESSAGES, SHORT = 3000, 900
POSITIONS = 50
RESTARTS_RATIO, BEATS_RATIO = 0.004, 0.1
OFTEN = NATS.model_copy(update={"snapshot_period_s": 1.0})


def empty() -> IndexFold:
    return IndexFold(NativeIndex(seed=1))


class Told(NamedTuple):
    """A log that was not purged: its messages in order, and the workers that sent them, as they are at its end."""

    messages: list[tuple[str, bytes]]
    workers: list[ToldWorker]
    log: EventLog

    async def snapshots(self) -> list[SnapshotName]:
        names = await self.log.objects(subjects.SNAPSHOT_BUCKET).names()
        return sorted(name for name in map(SnapshotName.read, names) if name is not None)


async def restart(worker: ToldWorker, index: Index) -> None:
    """Another life of the worker begins, and the index has heard of it."""
    worker.restart()
    await worker.beat()
    epochs = [worker.position(rank)[0] for rank in worker.ranks]
    await eventually(lambda: [index.view(rank).epoch for rank in worker.ranks] == epochs)


async def tell(log: EventLog, index: Index, messages: int) -> Told:
    """Let a fleet live, and an index keep snapshots meanwhile, until the log has so many messages."""
    random = Random(SEED)
    told = Told([], [ToldWorker(log, f"w{at}", random) for at in range(3)], log)
    while len(told.messages) < messages:
        worker = random.choice(told.workers)
        taken = []
        if random.random() < RESTARTS_RATIO and messages - len(told.messages) > len(worker.ranks):
            await restart(worker, index)
            taken = [await worker.flush(rank) for rank in worker.ranks]
        taken.append(await worker.flush(random.choice(worker.ranks), random.randint(1, 3)))
        for seq, subject, data in taken:
            told.messages.append((subject, data))
            assert seq == len(told.messages)
        if random.random() < BEATS_RATIO:
            for each in told.workers:
                await each.beat()
            await index.clock.advance(0.05)
    return told


@asynccontextmanager
async def telling(store: Path, messages: int) -> AsyncIterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "LOOK_S", 0.1)
        async with running_broker(store) as broker, connected(broker.url) as log:
            async with running_index(broker.url, nats=OFTEN) as index:
                told = await tell(log, index, messages)
            yield told


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Told]:
    """The log that all tests read, and none changes."""
    async with telling(tmp_path_factory.mktemp("told"), MESSAGES) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def short(tmp_path: Path) -> AsyncIterator[Told]:
    """A short log of one test's own."""
    async with telling(tmp_path, SHORT) as fleet:
        yield fleet


class Seen(NamedTuple):
    """What is known of a rank, its blocks in an order of their own."""

    epoch: int
    seq: int
    logged_seq: int
    stale: str
    digests: tuple[TierDigest, ...]
    blocks: list[HeldBlock]


class Compared(NamedTuple):
    """How many positions were looked at, where not all was equal, and how often something had to be said of a rank."""

    looked: int
    differing: list[int]
    notes: int

    @property
    def is_right(self) -> bool:
        """Whether all was equal, and seldom was a rank left out."""
        return not self.differing and self.notes <= self.looked // 10


def seen(fold: IndexFold) -> dict[WorkerRank, Seen]:
    def of(state: RankState | None) -> Seen:
        assert state is not None
        return Seen(state.epoch, state.seq, state.logged_seq, state.stale, state.digests, sorted(state.blocks()))

    return {rank: of(fold.state(rank)) for rank in fold.ranks()}


async def compared(told: Told, positions: Sequence[int]) -> Compared:
    """Hold time travel against a fold from the start, but for ranks of which something has to be said there."""
    scratch, folded, differ, noted = empty(), 0, [], 0
    for position in positions:
        for subject, data in told.messages[folded:position]:
            scratch.apply(Received(subjects.rank_of(subject), read_message(data)), 0.0)
        folded = position
        moment = await moment_at(told.log, position, empty())
        apart = {rank for rank, notes in moment.notes().items() if notes}
        there, made = (
            {rank: seen(fold)[rank] for rank in fold.ranks() if rank not in apart} for fold in (moment.fold, scratch)
        )
        noted += len(apart)
        if there != made:
            differ.append(position)
    return Compared(len(positions), differ, noted)


# ---------------------------------------------------------------- what is kept is what was


@pytest.mark.asyncio(loop_scope="module")
async def test_time_travel_equals_a_fold_from_the_start_of_an_unpurged_log(told: Told) -> None:
    positions = sorted(Random(SEED).sample(range(1, MESSAGES + 1), POSITIONS))
    found = await compared(told, positions)
    assert found.is_right, f"seed {SEED}: {found}"


@pytest.mark.asyncio(loop_scope="module")
async def test_only_the_log_behind_the_newest_snapshot_before_it_is_read(told: Told) -> None:
    names = await told.snapshots()
    for before, after in pairwise(names):
        moment = await moment_at(told.log, after.stream_seq - 1, empty())
        assert (moment.snapshot, moment.messages_read) == (str(before), after.stream_seq - 1 - before.stream_seq)
    first = await moment_at(told.log, names[0].stream_seq - 1, empty())
    assert (first.snapshot, first.messages_read) == ("", names[0].stream_seq - 1)


# ---------------------------------------------------------------- what is not kept is said


def shown(told: NotRetained) -> tuple[str, object, AvailableMoment | None, int]:
    return told.field, told.found, told.oldest, told.last_seq


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seq", [0, MESSAGES + 1, 1 << 70])
async def test_what_never_was_is_refused_with_what_can_be_had(told: Told, seq: int) -> None:
    first = await told.log.message_from(subjects.EVENTS_STREAM, 1)
    assert first is not None
    with pytest.raises(NotRetained) as refused:
        await index_at(told.log, seq)
    assert shown(refused.value) == ("seq", seq, AvailableMoment(1, first.time_ns), MESSAGES)
    allowed = r"allowed .*Z and later: the oldest that is kept is message 1,"
    with pytest.raises(NotRetained, match=f"time: found 1970-.*, {allowed}"):
        await seq_at(told.log, 10**9)


@pytest.mark.asyncio(loop_scope="module")
async def test_after_a_purge_the_oldest_that_can_be_had_is_that_of_a_snapshot_behind_which_the_log_is_whole(
    short: Told,
) -> None:
    before, after, *_ = names = await short.snapshots()
    await short.log.purge(subjects.EVENTS_STREAM, after.stream_seq - 1)
    oldest = await short.log.message_from(subjects.EVENTS_STREAM, after.stream_seq)
    assert oldest is not None
    available = AvailableMoment(after.stream_seq, oldest.time_ns)
    kept = [name.stream_seq for name in names]  # readable as they are; the first may be of message 1
    for seq in {1, before.stream_seq - 1, before.stream_seq + 1, after.stream_seq - 1}.difference(kept):
        with pytest.raises(NotRetained) as refused:
            await index_at(short.log, seq)
        assert shown(refused.value) == ("seq", seq, available, SHORT)
        assert time_text(oldest.time_ns) in str(refused.value)
    with pytest.raises(NotRetained) as refused:
        await seq_at(short.log, oldest.time_ns - 1)
    assert shown(refused.value)[0::2] == ("time", available)
    assert (await compared(short, sorted({*kept, *range(after.stream_seq, SHORT, 37)}))).differing == []
