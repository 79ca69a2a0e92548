"""An index that follows a real log in shared memory, and a reader of it, also while no index is there."""

import pytest
import pytest_asyncio

from indexer.embedded import IndexReader, SharedIndex
from indexer.follow.fold import RankView
from kv_runtime.config.sections import IndexSection
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.index_on_log import Index, gpu, running_index
from tests.system.integration.scripted_rank import ScriptedRank

CHAIN = range(1, 6)


@pytest.fixture
def shared() -> SharedIndex:
    return SharedIndex(IndexSection(memory_bytes_max=64 << 20), readers=1)


@pytest.fixture
def reader(shared: SharedIndex) -> IndexReader:
    return IndexReader(shared.region.reader(0))


@pytest_asyncio.fixture
async def scripted(log: EventLog) -> ScriptedRank:
    scripted = ScriptedRank(log)
    await scripted.start()
    return scripted


def seen(reader: IndexReader, scripted: ScriptedRank) -> RankView:
    return reader.overlap(list(CHAIN), [scripted.rank])[0]


async def same(index: Index, reader: IndexReader, scripted: ScriptedRank) -> RankView:
    """Return the reader's view once the index has applied all; it is the index's."""
    await index.until_at(scripted)
    await eventually(lambda: not reader.catching_up())
    assert seen(reader, scripted) == index.view(scripted.rank, *CHAIN)
    assert reader.log_seq() == index.index.log_seq()
    return seen(reader, scripted)


@pytest.mark.asyncio
async def test_a_reader_sees_what_the_index_knows(
    broker: Broker, scripted: ScriptedRank, shared: SharedIndex, reader: IndexReader
) -> None:
    assert reader.catching_up() == "log: not read yet"
    assert seen(reader, scripted).stale == "never_heard"
    async with running_index(broker.url, shared=shared) as index:
        await scripted.store(*CHAIN)
        assert (await same(index, reader, scripted)).overlap_blocks == gpu(5)
        await scripted.remove(3, 4, 5)
        assert (await same(index, reader, scripted)).overlap_blocks == gpu(2)
        await scripted.leave()
        await eventually(lambda: seen(reader, scripted).stale == "never_heard")


@pytest.mark.asyncio
async def test_while_no_process_writes_the_last_state_is_read_in_doubt_until_a_new_index_has_caught_up(
    broker: Broker, scripted: ScriptedRank, shared: SharedIndex, reader: IndexReader
) -> None:
    async with running_index(broker.url, shared=shared) as index:
        await scripted.store(*CHAIN)
        await same(index, reader, scripted)
    del index
    shared.on_writer_ended()
    await scripted.remove(5)
    view = seen(reader, scripted)
    assert (view.overlap_blocks, view.stale, reader.catching_up()) == (gpu(5), "log_away", "")
    async with running_index(broker.url, shared=shared) as index:
        view = await same(index, reader, scripted)
        assert (view.overlap_blocks, view.stale) == (gpu(4), "")
