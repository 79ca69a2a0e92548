"""What every prefix index dumps, loads and proves."""

from collections.abc import Iterator

import pytest

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.errors import LimitExceeded
from kv_protocol.recovery import BlockColumns, HeldBlock, block_columns
from tests.contract.indexes import (
    GPU,
    assert_sound,
    both,
    chain,
    dumped,
    forest,
    held,
    is_parents_first,
    load,
    overlaps,
)

# ------------------------------------------------------------------------------------------------- dump, load


def test_a_load_replaces_all_that_was_held(index: PrefixIndex) -> None:
    path, other = chain(3), chain(3, seed=2)
    index.store(0, None, path, GPU, 0)
    index.store(0, other[0], other[1:], GPU, 0)
    load(index, 0, [HeldBlock(path[0], None, 0b10), HeldBlock(other[0], None, 1)])
    assert held(index, 0) == {path[0]: (None, 2), other[0]: (None, 1)}
    assert overlaps(index, path) == {0: (0, 1, 1, 1)}
    assert_sound(index, 0)
    load(index, 0, [])
    assert (held(index, 0), index.statistics().nodes) == ({}, 0)


def test_a_dump_is_believed_about_blocks_whose_parent_is_not_held(index: PrefixIndex) -> None:
    path = chain(4)
    rows = [HeldBlock(path[1], path[0], 1), HeldBlock(path[3], path[2], 1)]
    load(index, 0, rows)
    assert held(index, 0) == {path[1]: (path[0], 1), path[3]: (path[2], 1)}
    assert (overlaps(index, path), index.digest(0, GPU).block_count) == ({}, 2)
    index.store(0, path[1], [path[2]], GPU, 0)
    index.store(0, None, [path[0]], GPU, 0)
    assert overlaps(index, path) == {0: both(4)}
    assert index.statistics().parent_conflicts_total == 0
    assert held(index, 0) == {block: (path[at - 1] if at else None, 1) for at, block in enumerate(path)}


def test_an_unheld_parent_is_forgotten_with_its_last_child(index: PrefixIndex) -> None:
    path = chain(4)
    load(index, 0, [HeldBlock(path[1], path[0], 1)])
    load(index, 1, [HeldBlock(path[3], path[2], 1)])
    index.store(2, path[0], chain(2, seed=2), GPU, 0)  # beside path[1], under the unheld path[0]
    assert index.statistics().nodes == 6
    index.clear(0)
    index.clear(1)
    assert index.statistics().nodes == 3
    index.clear(2)
    assert index.statistics().nodes == 0


# ------------------------------------------------------------------------------------------------- repair


def buckets_of(*hashes: int) -> bytes:
    named = bytearray(32)
    for sequence_hash in hashes:
        named[sequence_hash >> 59] |= 1 << (sequence_hash >> 56 & 7)
    return bytes(named)


def repair(index: PrefixIndex, rank: int, buckets: bytes, *rows: HeldBlock) -> None:
    index.repair(rank, buckets, block_columns(rows), 0)


def test_a_repair_replaces_the_named_buckets_and_nothing_else(index: PrefixIndex) -> None:
    path = [at << 56 | at for at in range(1, 5)]
    index.store(0, None, path, GPU, 0)
    index.store(1, None, path, GPU, 0)
    new, moved = path[1] + 1, HeldBlock(path[2], path[1], 0b10)
    repair(index, 0, buckets_of(path[1], path[2]), HeldBlock(new, path[0], 1), moved)
    assert held(index, 0) == {path[0]: (None, 1), new: (path[0], 1), path[2]: (path[1], 2), path[3]: (path[2], 1)}
    assert overlaps(index, [path[0], new]) == {0: both(2), 1: both(1)}
    assert overlaps(index, path) == {0: both(1), 1: both(4)}
    assert_sound(index, 0)
    repair(index, 0, buckets_of(*path))
    assert held(index, 0) == {}
    assert held(index, 1).keys() == set(path)


# ------------------------------------------------------------------------------------------------- memory, proof


def test_a_chain_of_any_length_needs_no_deep_stack(index: PrefixIndex) -> None:
    path = chain(20_000)
    for at in range(9_999, 4_999, -1):  # children first
        index.store(0, path[at - 1], path[at : at + 1], GPU, 0)
    index.store(0, path[9_999], path[10_000:], GPU, 0)
    index.store(0, None, path[:5_000], GPU, 0)
    assert overlaps(index, path) == {0: both(20_000)}
    index.load(1, index.dump(0), 0)
    index.drop(0)
    assert overlaps(index, path) == {1: both(20_000)}
    index.remove(1, path, GPU)
    assert index.statistics().nodes == 0


# ------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("chunk_blocks", [1, 3, 10, 11, 12, 1000])
def test_a_dump_comes_in_chunks(index: PrefixIndex, chunk_blocks: int) -> None:
    forest(index)
    chunks = list(index.dump(0, chunk_blocks))
    assert all(isinstance(columns, BlockColumns) for columns in chunks)
    assert [len(columns) for columns in chunks[:-1]] == [chunk_blocks] * (len(chunks) - 1)
    assert 1 <= len(chunks[-1]) <= chunk_blocks
    blocks = [block for columns in chunks for block in columns.blocks()]
    assert is_parents_first(blocks)
    assert {block.sequence_hash: block for block in blocks} == {each.sequence_hash: each for each in dumped(index, 0)}
    index.load(1, chunks, 0)
    assert held(index, 1) == held(index, 0)


def test_a_load_whose_chunks_turn_out_bad_leaves_all_as_before(index: PrefixIndex) -> None:
    forest(index)
    before = index.snapshot(), index.statistics()

    def chunks() -> Iterator[BlockColumns]:
        yield from block_columns([HeldBlock(5, None, 1)])
        yield BlockColumns(b"", b"", b"\1")

    with pytest.raises(LimitExceeded, match=r"^columns: found \(0, 0, 1\)"):
        index.load(0, chunks(), 0)
    assert (index.snapshot(), index.statistics()) == before


def test_an_index_may_be_changed_by_the_iterator_of_the_chunks(index: PrefixIndex) -> None:
    path = chain(30)

    def chunks() -> Iterator[BlockColumns]:
        for columns in block_columns([HeldBlock(path[0], None, 1), HeldBlock(path[1], path[0], 1)], 1):
            index.store(0, None, chain(50, seed=3), GPU, 0)
            index.store(1, None, path[:9], GPU, 0)
            yield columns

    index.load(0, chunks(), 0)
    assert overlaps(index, path) == {0: both(2), 1: both(9)}
    assert [row.sequence_hash for row in dumped(index, 0)] == path[:2]
    assert_sound(index)


# ------------------------------------------------------------------------------------------------- circles


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_rows_that_close_a_circle_are_cut_where_it_closes(index: PrefixIndex, length: int) -> None:
    ring = chain(length + 1)
    rows = [HeldBlock(ring[at + 1], ring[at], 1) for at in range(length)] + [HeldBlock(ring[0], ring[-1], 1)]
    load(index, 0, rows)
    assert held(index, 0) == {block: (ring[at - 1] if at else None, 1) for at, block in enumerate(ring)}
    assert index.statistics().parent_conflicts_total == 1
    assert_sound(index)
    index.store(1, ring[-1], ring[:1], GPU, 0)
    assert index.statistics().parent_conflicts_total == 2
    assert overlaps(index, ring) == {0: both(length + 1), 1: both(1)}
    index.store(1, None, ring[:1], GPU, 0)  # now its place is known
    index.store(1, ring[-1], ring[:1], GPU, 0)
    assert index.statistics().parent_conflicts_total == 3
    index.drop(0)
    index.drop(1)
    assert set(index.structure().values()) == {0}


def test_a_stored_circle_is_cut_too(index: PrefixIndex) -> None:
    load(index, 0, [HeldBlock(2, 1, 1)])
    index.store(0, 2, [3, 1], GPU, 0)
    assert held(index, 0) == {2: (1, 1), 3: (2, 1), 1: (None, 1)}
    assert index.statistics().parent_conflicts_total == 1
    index.store(0, None, [9, 1], GPU, 0)
    assert held(index, 0)[1] == (9, 1)
    assert overlaps(index, [9, 1, 2, 3]) == {0: both(4)}
    assert_sound(index)
