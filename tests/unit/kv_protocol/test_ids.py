from collections.abc import Callable

import pytest

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import (
    BLOCK_SIZE_MAX,
    DP_RANK_MAX,
    WorkerRank,
    checked_block_size,
    checked_dp_rank,
    checked_u64,
    checked_worker_id,
)


def checked_epoch(value: int) -> int:
    return checked_u64("epoch", value)


@pytest.mark.parametrize("worker_id", ["a", "0", "-", "worker-07", "z" * 64])
def test_a_worker_id_of_lower_case_digits_and_dashes_may_stand_in_a_subject(worker_id: str) -> None:
    assert checked_worker_id(worker_id) == worker_id


@pytest.mark.parametrize(
    "worker_id",
    ["", "z" * 65, "W", "a.b", "a b", "a_b", "a/b", "*", ">", "a\n", "\na", "é", "\u0661", "\u212a", "a\0"],
    ids=repr,
)
def test_any_other_worker_id_is_refused(worker_id: str) -> None:
    with pytest.raises(LimitExceeded, match=r"^worker_id: found ") as refused:
        checked_worker_id(worker_id)
    assert (refused.value.field, refused.value.found) == ("worker_id", worker_id)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (checked_dp_rank, 0),
        (checked_dp_rank, DP_RANK_MAX),
        (checked_block_size, 1),
        (checked_block_size, BLOCK_SIZE_MAX),
        (checked_epoch, 0),
        (checked_epoch, 2**64 - 1),
    ],
)
def test_both_ends_of_a_range_belong_to_it(check: Callable[[int], int], value: int) -> None:
    assert check(value) == value


@pytest.mark.parametrize(
    ("check", "value", "field"),
    [
        (checked_dp_rank, -1, "dp_rank"),
        (checked_dp_rank, DP_RANK_MAX + 1, "dp_rank"),
        (checked_block_size, 0, "block_size"),
        (checked_block_size, -16, "block_size"),
        (checked_block_size, BLOCK_SIZE_MAX + 1, "block_size"),
        (checked_block_size, 2662439576, "block_size"),  # seen in the field: `docs/SOURCES.md` E7, line 20
        (checked_epoch, -1, "epoch"),
        (checked_epoch, 2**64, "epoch"),
    ],
)
def test_a_value_beyond_its_range_is_refused_by_name(check: Callable[[int], int], value: int, field: str) -> None:
    with pytest.raises(LimitExceeded, match=rf"^{field}: found {value}, allowed ") as refused:
        check(value)
    assert (refused.value.field, refused.value.found) == (field, value)


def test_a_rank_is_written_as_worker_and_number() -> None:
    assert str(WorkerRank("w-1", 3)) == "w-1/3"
