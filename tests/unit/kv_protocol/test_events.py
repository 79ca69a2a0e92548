from typing import Any

import pytest

from kv_protocol.errors import LimitExceeded
from kv_protocol.events import TIERS, Batch, Cleared, Removed, Stored


def test_tiers_have_the_numbers_of_the_wire() -> None:
    assert {tier.name: tier.value for tier in TIERS} == {"GPU": 0, "HOST": 1, "DISK": 2, "EXTERNAL": 3}


@pytest.mark.parametrize("kind", [Stored, Removed])
def test_an_event_about_no_block_cannot_exist(kind: type[Stored | Removed]) -> None:
    with pytest.raises(LimitExceeded, match=r"^sequence_hashes: found 0, allowed at least one block"):
        kind(())


@pytest.mark.parametrize(("parent", "start"), [(None, 1), (None, -1), (7, 0), (0, 0)])
def test_blocks_lie_at_the_root_or_after_a_parent(parent: int | None, start: int) -> None:
    with pytest.raises(LimitExceeded, match=rf"^start: found {start}, allowed 0 without a parent, more than 0 with"):
        Stored((1,), parent, start)


@pytest.mark.parametrize(("n", "start"), [(1, -1), (1, 2**32), (2, 2**32 - 1), (1000, 2**32 - 999)])
def test_the_position_of_every_block_is_a_u32(n: int, start: int) -> None:
    with pytest.raises(LimitExceeded, match=rf"^start: found {start}, allowed a u32"):
        Stored(tuple(range(n)), 7, start)


@pytest.mark.parametrize("parent", [-1, 2**64])
def test_a_parent_is_a_u64(parent: int) -> None:
    with pytest.raises(LimitExceeded, match=rf"^parent: found {parent}, allowed u64"):
        Stored((1,), parent, 1)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("epoch", -1, "u64"),
        ("epoch", 2**64, "u64"),
        ("seq", 0, "1 or more"),
        ("seq", -1, "u64"),
        ("seq", 2**64, "u64"),
        ("source_seq", -1, "u64"),
        ("source_seq", 2**64, "u64"),
        ("engine_time_ns", 2**63, "i64"),
        ("engine_time_ns", -(2**63) - 1, "i64"),
    ],
)
def test_a_batch_number_beyond_its_width_cannot_exist(field: str, value: int, allowed: str) -> None:
    numbers: dict[str, Any] = {"epoch": 1, "seq": 1, field: value}
    with pytest.raises(LimitExceeded, match=rf"^{field}: found {value}, allowed {allowed}"):
        Batch(event=Cleared(), **numbers)
