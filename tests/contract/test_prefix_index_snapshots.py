"""What every prefix index writes into a snapshot, and restores from any implementation's."""

import struct
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from indexer.index.prefix_index import PrefixIndex
from indexer.index.snapshot import HEAD_BYTES, seal, unseal
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import (
    DISK,
    EXTERNAL,
    GPU,
    IMPLEMENTATIONS,
    U64_MAX,
    MakeIndex,
    assert_sound,
    chain,
    forest,
    held,
    load,
    overlaps,
    whole_tree,
    with_ranks,
)
from tests.support.amount import examples

READERS = pytest.mark.parametrize(
    "make_reader", IMPLEMENTATIONS.values(), ids=[f"to {name}" for name in IMPLEMENTATIONS]
)


def fill(index: PrefixIndex) -> list[list[int]]:
    """Hold a bit of everything; return the paths."""
    paths = forest(index)
    index.store(1, None, paths[0], GPU, 3)
    load(index, 2, [HeldBlock(U64_MAX, 77, 9), HeldBlock(0, U64_MAX, 2)], 4)
    index.store(1, 1234, [5, 6, 7], EXTERNAL, 5)
    index.store(2, 99, [5], DISK, 6)
    index.register(4095)
    return [*paths, [77, U64_MAX, 0]]


def known(index: PrefixIndex) -> list[object]:
    """Return what an index says of all that `fill` told it."""
    now, blocks = index.statistics(), sorted(held(index, 0) | held(index, 2))
    return [
        [held(index, rank) for rank in (0, 1, 2, 4095)],
        [index.bucket_digests(rank, tier) for rank in (0, 1, 2, 4095) for tier in TIERS],
        [index.children(block) for block in (None, 77, *blocks)],
        [index.holders(block) for block in (77, *blocks)],
        (now.ranks, now.nodes, now.held_blocks),
    ]


@READERS
def test_a_restored_index_knows_all_that_was_known(
    index: PrefixIndex, make_index: MakeIndex, make_reader: MakeIndex
) -> None:
    paths = fill(index)
    reader = with_ranks(make_reader(), 9)
    reader.store(7, None, chain(3, seed=8), GPU, 0)
    reader.restore(index.snapshot())
    assert known(reader) == known(index)
    assert [overlaps(reader, path) for path in paths] == [overlaps(index, path) for path in paths]
    assert_sound(reader)
    assert whole_tree(reader, is_timed=True) == whole_tree(index, is_timed=True)
    with pytest.raises(KeyError):
        reader.digest(7, GPU)
    again = make_index()
    again.restore(reader.snapshot())
    assert known(again) == known(index)


@READERS
def test_a_restored_index_lives_on(index: PrefixIndex, make_reader: MakeIndex) -> None:
    paths = fill(index)
    reader = make_reader()
    reader.restore(index.snapshot())
    for each in (index, reader):
        each.store(0, None, paths[0], GPU, 20)
        each.store(2, None, [77], GPU, 20)
        each.remove(1, paths[0][1:3], GPU)
    assert known(reader) == known(index)
    for rank in (0, 1, 2, 4095):
        reader.drop(rank)
    assert set(reader.structure().values()) == {0}
    assert_sound(reader)


# ------------------------------------------------------------------------------------------------- damage


def refuses(index: PrefixIndex, data: bytes, offset: int | None = None) -> None:
    before = index.snapshot(), index.statistics()
    with pytest.raises(MalformedMessage) as refused:
        index.restore(data)
    assert 0 <= refused.value.offset <= max(len(data), HEAD_BYTES)
    assert refused.value.reason
    assert offset is None or refused.value.offset == offset
    assert (index.snapshot(), index.statistics()) == before


@pytest.fixture
def full(index: PrefixIndex) -> PrefixIndex:
    fill(index)
    return index


def test_every_truncation_is_refused_and_changes_nothing(full: PrefixIndex) -> None:
    data = full.snapshot()
    for length in range(len(data)):
        refuses(full, data[:length])


def test_every_truncation_of_the_body_is_refused_and_changes_nothing(full: PrefixIndex) -> None:
    body = bytes(unseal(full.snapshot()))
    for length in range(len(body)):
        refuses(full, seal(body[:length]))


def test_a_flipped_bit_is_refused_wherever_it_is(full: PrefixIndex) -> None:
    data = full.snapshot()
    for at in range(len(data)):
        refuses(full, data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


# ------------------------------------------------------------------------------------------------- lies


def run(
    *hashes: int,
    parent: int = 0,
    flags: int = 0,
    holders: int = 1,
    last_stored_s: float = 0.0,
    n: int | None = None,
) -> bytes:
    count = len(hashes) if n is None else n
    return struct.pack(f"<BQIdI{len(hashes)}Q", flags, parent, holders, last_stored_s, count, *hashes)


def body(
    ranks: tuple[int, ...] = (0, 3),
    sets: tuple[tuple[int, ...], ...] = ((0 << 4 | 1,), (0 << 4 | 3, 3 << 4 | 8)),
    runs: tuple[bytes, ...] = (run(1, 2), run(3, parent=2, flags=1, holders=2)),
    *,
    counts: tuple[int | None, int | None, int | None] = (None, None, None),
    reserved: int = 0,
) -> bytes:
    """Return a body, valid unless told otherwise; `counts` replace the true ones."""
    said = [len(each) if count is None else count for each, count in zip((ranks, sets, runs), counts, strict=True)]
    parts = [struct.pack("<I", said[0]), *(struct.pack("<I", rank) for rank in ranks), struct.pack("<I", said[1])]
    parts += [struct.pack(f"<I{len(each)}I", len(each), *each) for each in sets]
    parts += [struct.pack("<Q", said[2]), *runs, struct.pack("<I", reserved)]
    return b"".join(parts)


def test_a_snapshot_made_by_hand_is_restored(index: PrefixIndex) -> None:
    index.restore(seal(body()))
    assert held(index, 0) == {1: (None, 1), 2: (1, 1), 3: (2, 3)}
    assert held(index, 3) == {3: (2, 8)}
    assert_sound(index, 3)


def test_runs_may_be_cut_and_sets_be_said_twice_or_for_nothing(index: PrefixIndex) -> None:
    sets = ((1,), (1,), (3 << 4 | 15,))
    runs = (run(1, 2, 3), run(4, parent=3, flags=1, holders=2), run(5, parent=2, flags=1))
    index.restore(seal(body(sets=sets, runs=runs)))
    assert held(index, 0) == {1: (None, 1), 2: (1, 1), 3: (2, 1), 4: (3, 1), 5: (2, 1)}
    assert index.children(2) == [3, 5]
    assert_sound(index)
    index.drop(0)
    index.drop(3)
    assert set(index.structure().values()) == {0}


LIES: dict[str, bytes] = {
    "no ranks, though held": body(ranks=()),
    "a rank twice": body(ranks=(0, 0, 3)),
    "ranks descending": body(ranks=(3, 0)),
    "a rank too large": body(ranks=(0, 3, 4096)),
    "ranks without end": body(counts=(2**32 - 1, None, None)),
    "a set without members": body(sets=((1,), ())),
    "a member without a tier": body(sets=((0,), (1,))),
    "a member twice": body(sets=((1, 2), (1,))),
    "members descending": body(sets=((3 << 4 | 1, 1), (1,))),
    "a member of an unknown rank": body(sets=((1,), (2 << 4 | 1,))),
    "a member of a rank too large": body(sets=((1,), (2**28 - 1 << 4 | 1,))),
    "sets without end": body(counts=(None, 2**32 - 1, None)),
    "runs without end": body(counts=(None, None, 2**64 - 1)),
    "runs with a size in bytes above 2**64": body(counts=(None, None, 2**61)),
    "a run too few": body(counts=(None, None, 1)),
    "a hash twice in a run": body(runs=(run(1, 1),)),
    "a hash in two runs": body(runs=(run(1, 2), run(2))),
    "a child before its parent": body(runs=(run(3, parent=2, flags=1), run(1, 2))),
    "a block that is its own parent": body(runs=(run(3, parent=3, flags=1),)),
    "a parent that is behind it": body(runs=(run(3, 4, parent=4, flags=1),)),
    "a parent that is nowhere": body(runs=(run(1), run(3, parent=9, flags=1))),
    "a parent without its flag": body(runs=(run(1), run(3, parent=1))),
    "an unknown parent with a name": body(runs=(run(1), run(3, parent=1, flags=2))),
    "a parent known and unknown": body(runs=(run(1), run(3, parent=1, flags=3))),
    "an unknown flag": body(runs=(run(1, flags=4),)),
    "a set that there is not": body(runs=(run(1, holders=3),)),
    "a set far off": body(runs=(run(1, holders=2**32 - 1),)),
    "stored at no time": body(runs=(run(1, last_stored_s=float("nan")),)),
    "stored never": body(runs=(run(1, last_stored_s=float("inf")),)),
    "a run without blocks": body(runs=(run(), run(1))),
    "blocks without end": body(runs=(run(1, n=2**32 - 1),)),
    "a block too many": body(runs=(run(1, n=2),)),
    "a block without holders at the end": body(runs=(run(1), run(2, holders=0))),
    "a block without holders behind another": body(runs=(run(1, holders=0), run(2, holders=0, parent=1, flags=1))),
    "a block without holders before a fork above it": body(runs=(run(1, 2, holders=0), run(3, parent=1, flags=1))),
    "something reserved": body(reserved=1),
    "bytes after the end": body() + b"\0",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_body_that_cannot_be_is_refused_and_changes_nothing(full: PrefixIndex, lie: bytes) -> None:
    refuses(full, seal(lie))


@pytest.mark.parametrize(
    ("lie", "offset"),
    [
        (body(ranks=(0, 3, 4096)), HEAD_BYTES + 4 + 8),
        (body(sets=((1,), ())), HEAD_BYTES + 12 + 4 + 8),
        (body(runs=(run(1, 1),)), HEAD_BYTES + 12 + 24 + 8 + 25 + 8),
        (body(runs=(run(1, flags=4),)), HEAD_BYTES + 12 + 24 + 8),
        (body(runs=(run(1, n=2**32 - 1),)), HEAD_BYTES + 12 + 24 + 8 + 21),
    ],
)
def test_a_lie_is_named_where_it_stands(full: PrefixIndex, lie: bytes, offset: int) -> None:
    refuses(full, seal(lie), offset)


@pytest.mark.parametrize("change", [0xFF, 1, 0x80, 0x7F][: examples(4, least=1)])
def test_any_byte_of_a_sealed_body_may_be_anything(full: PrefixIndex, make_index: MakeIndex, change: int) -> None:
    valid, index, twin = bytes(unseal(full.snapshot())), make_index(), make_index()
    for at in Random(change).sample(range(len(valid)), examples(len(valid))):
        data = seal(valid[:at] + bytes([valid[at] ^ change]) + valid[at + 1 :])
        refused = refusal_of(index, data)
        if refused is not None:
            assert HEAD_BYTES <= refused.offset <= len(data), (at, refused)
            assert index.statistics().nodes == index.statistics().ranks == 0, at
        else:
            assert_sound(index)
            twin.restore(index.snapshot())
            assert whole_tree(twin) == whole_tree(index), at
            index = make_index()


def refusal_of(index: PrefixIndex, data: bytes) -> MalformedMessage | None:
    try:
        index.restore(data)
    except MalformedMessage as error:
        return error
    return None


def test_the_checksum_is_xxh3_of_the_body(index: PrefixIndex) -> None:
    data = index.snapshot()
    assert data[:8] == b"KVROUTER"
    assert struct.unpack_from("<IIQQ", data, 8) == (1, 0, len(data) - 32, xxh3_64_intdigest(data[32:]))
