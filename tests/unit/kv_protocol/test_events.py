from typing import Any

import pytest

from kv_protocol.errors import LimitExceeded
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier


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
    ("n", "parent", "start"), [(1, None, 0), (1, 0, 1), (1, 2**64 - 1, 2**32 - 1), (2, 1, 2**32 - 2)]
)
def test_the_ends_of_the_ranges_of_a_stored_event_are_allowed(n: int, parent: int | None, start: int) -> None:
    stored = Stored(tuple(range(n)), parent, start)
    assert (stored.parent, stored.start) == (parent, start)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 0),
        ("epoch", 2**64 - 1),
        ("seq", 2**64 - 1),
        ("source_seq", 2**64 - 1),
        ("engine_time_ns", 2**63 - 1),
        ("engine_time_ns", -(2**63)),
    ],
)
def test_the_ends_of_the_widths_of_a_batch_are_allowed(field: str, value: int) -> None:
    numbers: dict[str, Any] = {"epoch": 1, "seq": 1, field: value}
    assert getattr(Batch(event=Cleared(), **numbers), field) == value


@pytest.mark.parametrize("event", [Stored((1, 2)), Removed((1, 2)), Cleared()], ids=lambda event: type(event).__name__)
def test_an_event_never_changes(event: Event) -> None:
    with pytest.raises(AttributeError):
        event.tier = Tier.DISK  # type: ignore[misc]
    assert event.tier is Tier.GPU


def test_events_that_say_the_same_are_equal_and_hash_alike() -> None:
    assert len({Stored((1,)), Stored((1,), None, 0, Tier.GPU), Removed((1,)), Removed((1,)), Cleared()}) == 3
