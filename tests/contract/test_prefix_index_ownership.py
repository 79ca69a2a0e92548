"""No prefix index keeps what it was given: what its caller does with that afterwards is nothing to it."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.codec import encode_message, pack_u64
from kv_protocol.events import Batch, Stored
from kv_protocol.recovery import BlockColumns, HeldBlock, block_columns
from tests.contract.indexes import GPU, MakeIndex, both, chain, dumped, with_ranks

PATH = chain(30)


def shown(index: PrefixIndex) -> tuple[object, ...]:
    return index.snapshot(), dumped(index, 0), index.digest(0, GPU), index.overlaps(PATH), index.self_check()


@pytest.mark.parametrize("parent", [None, 404], ids=["held", "parked"])
@pytest.mark.parametrize(
    "given",
    [lambda: bytearray(pack_u64(PATH)), lambda: array("Q", PATH), lambda: list(PATH)],
    ids=["bytes", "u64s", "list"],
)
def test_hashes_that_were_stored_may_change(index: PrefixIndex, parent: int | None, given: Callable[[], Any]) -> None:
    hashes = given()
    index.store(0, parent, hashes, GPU, 0)
    before = shown(index)
    for at in range(len(hashes)):
        hashes[at] = 9
    hashes.clear() if isinstance(hashes, list) else hashes.extend(hashes)
    assert shown(index) == before


def test_a_message_that_was_applied_may_change(index: PrefixIndex) -> None:
    message = bytearray(encode_message([Batch(1, 1, Stored(tuple(PATH[:20]))), Batch(1, 2, Stored((5,), 404, 9))]))
    assert index.apply_batch(0, message, 0) == []
    before = shown(index)
    message[:] = b"\xff" * len(message)
    message.clear()
    assert shown(index) == before
    assert index.overlaps(PATH) == {0: both(20)}


def test_a_snapshot_that_was_restored_may_change(index: PrefixIndex, make_index: MakeIndex) -> None:
    index.store(0, None, PATH, GPU, 0)
    index.store(0, 404, [5], GPU, 0)
    data, copy = bytearray(index.snapshot()), make_index()
    copy.restore(data, 0)
    data[:] = b"\xff" * len(data)
    data.clear()
    assert shown(copy) == shown(index)


def test_chunks_that_were_loaded_may_change(index: PrefixIndex) -> None:
    rows = [HeldBlock(block, parent, 1) for block, parent in zip(PATH, [None, *PATH], strict=False)]
    chunks = list(block_columns(rows, 7))
    index.load(0, chunks, 0)
    before = shown(index)
    chunks.reverse()
    chunks.clear()
    assert shown(index) == before
    assert index.overlaps(PATH) == {0: both(30)}


def test_an_index_may_be_changed_by_the_iterator_of_the_chunks(make_index: MakeIndex) -> None:
    index = with_ranks(make_index())

    def chunks() -> Iterator[BlockColumns]:
        for columns in block_columns([HeldBlock(PATH[0], None, 1), HeldBlock(PATH[1], PATH[0], 1)], 1):
            index.store(0, None, chain(50, seed=3), GPU, 0)
            index.store(1, None, PATH[:9], GPU, 0)
            yield columns

    index.load(0, chunks(), 0)
    assert index.overlaps(PATH) == {0: both(2), 1: both(9)}
    assert [row.sequence_hash for row in dumped(index, 0)] == PATH[:2]
    assert index.self_check() == []
