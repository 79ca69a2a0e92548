"""Numbers that no prefix index knows anything of, and what is no number or no buffer at all."""

from array import array
from math import inf, nan
from typing import Any

import pytest

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.codec import encode_message
from kv_protocol.errors import LimitExceeded
from kv_protocol.events import Batch, Stored
from tests.contract.indexes import GPU, chain, forest

NO_U64: list[Any] = [-1, 2**64, -(10**30), 10**30, 1.5, "1"]
MESSAGE = encode_message([Batch(1, 1, Stored((1, 2)))])


@pytest.fixture
def full(index: PrefixIndex) -> PrefixIndex:
    """Return an index with forks, a hole, and a block that is parked."""
    forest(index)
    index.store(1, 77, [78], GPU, 0)
    return index


def state(index: PrefixIndex) -> tuple[object, ...]:
    """Return all that a refused call must leave alone."""
    return index.snapshot(), index.statistics(), index.overfull()


@pytest.mark.parametrize("sequence_hash", NO_U64)
def test_what_is_no_sequence_hash_has_neither_holders_nor_children(full: PrefixIndex, sequence_hash: Any) -> None:
    for ask in (full.holders, full.children):
        with pytest.raises(LimitExceeded) as refused:
            ask(sequence_hash)
        assert (refused.value.field, refused.value.allowed) == ("sequence_hash", "u64")
        assert refused.value.found == sequence_hash


@pytest.mark.parametrize("parent", NO_U64)
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


@pytest.mark.parametrize("message", ["x", "", None, 7, [1, 2]], ids=repr)
def test_a_message_that_is_no_buffer_is_a_type_error(full: PrefixIndex, message: Any) -> None:
    before = state(full)
    with pytest.raises(TypeError):
        full.apply_batch(0, message, 0)
    assert state(full) == before


@pytest.mark.parametrize("data", ["x", None, 7, [1, 2]], ids=repr)
def test_a_snapshot_that_is_no_buffer_is_a_type_error(full: PrefixIndex, data: Any) -> None:
    before = state(full)
    with pytest.raises(TypeError):
        full.restore(data, 0)
    assert state(full) == before


def test_none_is_neither_hashes_nor_room_for_depths(full: PrefixIndex) -> None:
    before, out = state(full), array("i", [7] * 12)
    nothing: Any = None
    for ask in (
        lambda: full.store(0, None, nothing, GPU, 0),
        lambda: full.store(0, 404, nothing, GPU, 0),
        lambda: full.remove(0, nothing, GPU),
        lambda: full.overlaps(nothing),
        lambda: full.match(nothing, out),
    ):
        with pytest.raises(LimitExceeded, match=r"^sequence_hashes: found 'NoneType', allowed "):
            ask()
    with pytest.raises(LimitExceeded, match=r"^out: found 'NoneType', allowed "):
        full.match([1], nothing)
    assert state(full) == before
    assert list(out) == [7] * 12
