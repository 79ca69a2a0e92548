"""What every prefix index takes, and what it refuses before anything changes."""

from array import array
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from indexer.index.prefix_index import RANK_MAX, PrefixIndex
from kv_protocol.codec import encode_message, pack_u64
from kv_protocol.errors import LimitExceeded
from kv_protocol.events import TIERS, Batch, Stored
from tests.contract.indexes import GPU, HOST, U64_MAX, both, chain, forest, held

PATH = [*chain(3), 0, U64_MAX]
Given = Callable[[list[int]], Any]

FORMS: dict[str, Given] = {
    "list": list,
    "tuple": tuple,
    "bytes": pack_u64,
    "bytearray": lambda hashes: bytearray(pack_u64(hashes)),
    "view of bytes": lambda hashes: memoryview(pack_u64(hashes)),
    "array": lambda hashes: array("Q", hashes),
    "view of an array": lambda hashes: memoryview(array("Q", hashes)),
    "part of a view": lambda hashes: memoryview(array("Q", [1, *hashes, 2]))[1:-1],
    "bytes at an odd address": lambda hashes: memoryview(b"\0" + pack_u64(hashes))[1:],
}

NO_HASHES: dict[str, Any] = {
    "7 bytes": b"\1" * 7,
    "9 bytes": bytearray(9),
    "u32s": array("I", [1, 2]),
    "doubles": array("d", [1.0]),
    "i64s": array("q", [1]),
    "every second": memoryview(array("Q", [1, 2, 3, 4]))[::2],
    "a number": 7,
    "None": None,
}

NO_U64: dict[str, Any] = {
    "negative": [1, -1],
    "too large": (2, 2**64),
    "far too large": [2**200],
    "a fraction": [1.5],
    "None": [1, None],
    "text": ["1"],
    "letters": "abc",
}


def state(index: PrefixIndex) -> tuple[object, ...]:
    """Return all that a refused call must leave alone."""
    return index.snapshot(), index.statistics(), index.overfull()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_hashes_come_as_numbers_or_in_a_buffer(index: PrefixIndex, form: Given) -> None:
    index.store(0, None, form(PATH), GPU, 0)
    assert list(held(index, 0)) == PATH
    assert index.overlaps(form(PATH)) == {0: both(5)}
    out = array("i", [7] * 12)
    assert index.match(form(PATH), out) == 5
    assert list(out) == [5, 0, 0] * 4
    index.remove(0, form(PATH[1:]), GPU)
    assert index.overlaps(form(PATH)) == {0: both(1)}


@pytest.mark.parametrize("given", NO_HASHES.values(), ids=NO_HASHES)
def test_what_is_neither_is_refused(index: PrefixIndex, given: Any) -> None:
    refuses_hashes(index, given, "^sequence_hashes: found ")


@pytest.mark.parametrize("given", NO_U64.values(), ids=NO_U64)
def test_a_number_that_is_no_u64_is_refused(index: PrefixIndex, given: Any) -> None:
    refuses_hashes(index, given, "^sequence_hash: found ")


def refuses_hashes(index: PrefixIndex, given: Any, match: str) -> None:
    index.store(0, None, PATH, GPU, 0)
    before, out = state(index), array("i", [7] * 12)
    for ask in (
        lambda: index.store(0, None, given, GPU, 0),
        lambda: index.store(0, 12345, given, GPU, 0),
        lambda: index.remove(0, given, GPU),
        lambda: index.overlaps(given),
        lambda: index.match(given, out),
    ):
        with pytest.raises(LimitExceeded, match=match):
            ask()
    assert state(index) == before
    assert list(out) == [7] * 12


@pytest.mark.parametrize("tier", [-1, 4, 255])
def test_a_tier_that_there_is_not_is_refused(index: PrefixIndex, tier: Any) -> None:
    index.store(0, None, PATH, GPU, 0)
    before = state(index)
    for ask in (
        lambda: index.store(0, None, PATH, tier, 0),
        lambda: index.remove(0, PATH, tier),
        lambda: index.clear(0, tier),
        lambda: index.digest(0, tier),
        lambda: index.bucket_digests(0, tier),
    ):
        with pytest.raises(LimitExceeded, match=rf"^tier: found {tier}, allowed 0\.\.3$"):
            ask()
    assert state(index) == before


@pytest.mark.parametrize("rank", [-1, RANK_MAX + 1, 2**32, 2**64])
def test_a_rank_beyond_the_largest_is_refused(index: PrefixIndex, rank: int) -> None:
    before = state(index)
    with pytest.raises(LimitExceeded, match=rf"^rank: found {rank}, allowed 0\.\.4095$"):
        index.register(rank)
    assert state(index) == before


@pytest.mark.parametrize("capacity_blocks", [-1, 2**32, 2**64])
def test_a_capacity_that_is_no_u32_is_refused(index: PrefixIndex, capacity_blocks: int) -> None:
    before = state(index)
    for rank in (0, 7):
        with pytest.raises(LimitExceeded, match=f"^capacity_blocks: found {capacity_blocks}, allowed "):
            index.register(rank, capacity_blocks)
    assert state(index) == before


MESSAGE = encode_message([Batch(1, 1, Stored((1,)))])


@pytest.mark.parametrize("rank", [3, RANK_MAX, RANK_MAX + 1, -1])
def test_an_unknown_rank_is_a_key_error_and_dropping_it_is_nothing(index: PrefixIndex, rank: int) -> None:
    index.store(0, None, PATH, GPU, 0)
    before = state(index)
    for ask in (
        lambda: index.store(rank, None, PATH, GPU, 0),
        lambda: index.store(rank, 77, [1], GPU, 0),
        lambda: index.remove(rank, PATH, GPU),
        lambda: index.clear(rank),
        lambda: index.clear(rank, GPU),
        lambda: index.load(rank, [], 0),
        lambda: index.repair(rank, bytes(32), [], 0),
        lambda: index.apply_batch(rank, MESSAGE, 0),
        lambda: index.digest(rank, GPU),
        lambda: index.bucket_digests(rank, GPU),
        lambda: index.dump(rank),
    ):
        with pytest.raises(KeyError):
            ask()
    index.drop(rank)
    assert state(index) == before


# ------------------------------------------------------------------------------------------------- depths


def test_every_number_of_the_rows_is_written(index: PrefixIndex) -> None:
    index.store(2, None, PATH, HOST, 0)
    index.store(0, None, PATH[:2], GPU, 0)
    for columns in (3, 4, 70):
        out = array("i", [-7] * 4 * columns)
        assert index.match(PATH, out) == 5
        rows = [list(out[tier * columns : (tier + 1) * columns]) for tier in TIERS]
        rest = [0] * (columns - 3)
        assert rows == [[2, 0, 0, *rest], [2, 0, 5, *rest], [2, 0, 5, *rest], [2, 0, 5, *rest]]
    assert index.match([404], out) == 0
    assert set(out) == {0}


NO_ROWS: dict[str, Any] = {
    "read-only": bytes(48),
    "a column too few": array("i", [7] * 8),
    "rows that are not equal": array("i", [7] * 13),
    "u64s": array("Q", [7] * 12),
    "floats": array("f", [7] * 12),
    "bytes": bytearray(b"\7" * 48),
    "every second": memoryview(array("i", [7] * 24))[::2],
    "a list": [7] * 12,
}


@pytest.mark.parametrize("out", NO_ROWS.values(), ids=NO_ROWS)
def test_a_buffer_that_cannot_hold_the_depths_is_refused(index: PrefixIndex, out: Any) -> None:
    index.store(0, None, PATH, GPU, 0)
    before = list(out)
    with pytest.raises(LimitExceeded, match=r"^out: found "):
        index.match(PATH, out)
    assert list(out) == before


@pytest.mark.parametrize("limit", [-1, -(2**70)])
def test_a_limit_below_nothing_is_refused(index: PrefixIndex, limit: int) -> None:
    with pytest.raises(LimitExceeded, match=f"^limit: found {limit}, allowed "):
        index.chain(PATH[0], limit)


# ------------------------------------------------------------------------------------------------- no buffers

NO_NUMBERS: list[Any] = [-1, 2**64, -(10**30), 10**30, 1.5, "1"]


@pytest.fixture
def full(index: PrefixIndex) -> PrefixIndex:
    """Return an index with forks, a hole, and a block that is parked."""
    forest(index)
    index.store(1, 77, [78], GPU, 0)
    return index


@pytest.mark.parametrize("sequence_hash", NO_NUMBERS)
def test_what_is_no_sequence_hash_has_neither_holders_nor_children(full: PrefixIndex, sequence_hash: Any) -> None:
    for ask in (full.holders, full.children):
        with pytest.raises(LimitExceeded) as refused:
            ask(sequence_hash)
        assert (refused.value.field, refused.value.allowed) == ("sequence_hash", "u64")
        assert refused.value.found == sequence_hash


@pytest.mark.parametrize("parent", NO_NUMBERS)
def test_what_is_no_sequence_hash_is_no_parent(full: PrefixIndex, parent: Any) -> None:
    before = state(full)
    with pytest.raises(LimitExceeded, match=r"^parent: found .*, allowed u64$"):
        full.store(0, parent, [1], GPU, 0)
    assert state(full) == before


@pytest.mark.parametrize("now_s", [inf, -inf, nan], ids=str)
def test_a_time_that_is_not_finite_is_refused_and_changes_nothing(full: PrefixIndex, now_s: float) -> None:
    snapshot, columns = full.snapshot(), list(full.dump(0))
    full.remove(0, chain(4)[3:], GPU)  # so that a load or a restore would be seen
    before = state(full)
    for tell in (
        lambda: full.store(0, None, [1], GPU, now_s),
        lambda: full.store(0, 404, [1], GPU, now_s),
        lambda: full.store(0, None, [], GPU, now_s),
        lambda: full.load(0, columns, now_s),
        lambda: full.apply_batch(0, MESSAGE, now_s),
        lambda: full.restore(snapshot, now_s),
    ):
        with pytest.raises(LimitExceeded, match=f"^now_s: found {now_s}, allowed a finite number$"):
            tell()
        assert state(full) == before


@pytest.mark.parametrize("given", ["x", "", None, 7, [1, 2]], ids=repr)
def test_what_is_no_buffer_is_neither_a_message_nor_a_snapshot(full: PrefixIndex, given: Any) -> None:
    before = state(full)
    for take in (lambda: full.apply_batch(0, given, 0), lambda: full.restore(given, 0)):
        with pytest.raises(TypeError):
            take()
    assert state(full) == before
