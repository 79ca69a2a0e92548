"""What a keeper of snapshots should do now: every rule, and what must not be lost."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.service.retention import (
    KeepingLimits,
    LogExtent,
    RetentionPlan,
    SnapshotName,
    of_this_log,
    plan,
    to_give_up,
)

S = 10**9
NOW_S = 10_000
LIMITS = KeepingLimits(period_s=300.0, log_bytes_max=1000)
QUIET = LogExtent(first_seq=1, last_seq=100, bytes_now=100)
"""A log with room to spare: one byte a message."""
FULL = LogExtent(first_seq=101, last_seq=900, bytes_now=800)


def name(stream_seq: int, age_s: float = 0.0) -> str:
    return str(SnapshotName(stream_seq, round((NOW_S - age_s) * S)))


def planned(log: LogExtent, *names: str, verified: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> RetentionPlan:
    return plan(log, names, NOW_S * S, LIMITS, verified=verified, others=others)


def to_try(log: LogExtent, names: Iterable[str], others: tuple[str, ...] = ()) -> list[str]:
    return [str(each) for each in of_this_log(log, names, others)]


def test_a_name_says_the_place_and_the_time_and_sorts_by_them() -> None:
    assert str(SnapshotName(17, 5)) == "00000000000000000017-00000000000000000005"
    assert SnapshotName.read(str(SnapshotName(17, 5))) == SnapshotName(17, 5)
    assert str(SnapshotName(9, 8)) < str(SnapshotName(10, 1)) < str(SnapshotName(10, 2))


@pytest.mark.parametrize("text", ["", "x", "17-5", f"{name(1)}x", f"x{name(1)}", name(1).replace("-", "_"), "٣" * 41])
def test_other_names_are_not_snapshots(text: str) -> None:
    assert SnapshotName.read(text) is None
    assert planned(QUIET, text) == RetentionPlan(write=True, purge_up_to=0, delete=())
    assert (to_try(QUIET, [text]), to_give_up(QUIET, [text, text])) == ([], [])


# ---------------------------------------------------------------- write


def test_the_first_is_written_once_there_is_something_to_cover() -> None:
    assert planned(LogExtent(first_seq=1, last_seq=0, bytes_now=0)).write is False
    assert planned(LogExtent(first_seq=1, last_seq=1, bytes_now=1)).write is True


def test_one_is_written_when_the_newest_is_as_old_as_the_period() -> None:
    assert planned(QUIET, name(50, age_s=299)).write is False
    assert planned(QUIET, name(50, age_s=300)).write is True
    assert planned(QUIET, name(50, age_s=299), name(40, age_s=900)).write is False


def test_none_is_written_when_the_newest_covers_all() -> None:
    assert planned(QUIET, name(100, age_s=900)).write is False
    assert planned(QUIET, name(99, age_s=900)).write is True


def test_one_is_written_when_the_log_grew_by_a_quarter_of_its_limit_since() -> None:
    log = LogExtent(first_seq=1, last_seq=700, bytes_now=700)
    assert planned(log, name(450)).write is False
    assert planned(log, name(449)).write is True


def test_a_log_whose_covered_part_is_gone_grew_by_what_is_left() -> None:
    log = LogExtent(first_seq=500, last_seq=699, bytes_now=200)
    assert planned(log, name(10)).write is False
    assert planned(log._replace(bytes_now=251), name(10)).write is True


def test_a_clock_that_was_set_back_is_no_reason_to_wait_and_writers_that_differ_by_little_are_none_to_write() -> None:
    assert planned(QUIET, name(50, age_s=-299)).write is False
    assert planned(QUIET, name(50, age_s=-300)).write is True


def test_a_snapshot_of_another_log_covers_nothing_of_this_one() -> None:
    assert planned(QUIET, name(101)).write is True
    assert planned(QUIET, name(101), name(50)).write is False


def test_a_snapshot_that_is_known_to_be_of_another_log_covers_nothing_whatever_its_place() -> None:
    assert planned(QUIET, name(100)).write is False
    assert planned(QUIET, name(100), others=(name(100),)).write is True
    assert planned(QUIET, name(100), name(50), others=(name(100),)).write is False


# ---------------------------------------------------------------- purge


def test_nothing_is_purged_before_it_is_covered_by_what_was_read_back() -> None:
    assert planned(FULL, name(800)).purge_up_to == 0
    assert planned(FULL, name(800), name(400), verified=(name(400),)).purge_up_to == 400


def test_nothing_is_purged_up_to_three_quarters_of_the_limit() -> None:
    log = LogExtent(first_seq=1, last_seq=750, bytes_now=750)
    assert planned(log, name(700), verified=(name(700),)).purge_up_to == 0
    assert planned(log._replace(bytes_now=751), name(700), verified=(name(700),)).purge_up_to == 700


def test_a_purge_leaves_as_much_history_as_half_of_the_limit_has_room_for() -> None:
    names = name(300), name(400), name(500), name(899)
    assert planned(FULL, *names, verified=names).purge_up_to == 400


def test_where_no_snapshot_leaves_half_of_the_limit_the_newest_must_do() -> None:
    names = name(200), name(300)
    assert planned(FULL, *names, verified=names).purge_up_to == 300


def test_what_is_gone_is_not_purged_again() -> None:
    assert planned(FULL, name(100), verified=(name(100),)).purge_up_to == 0
    assert planned(FULL, name(101), verified=(name(101),)).purge_up_to == 101


def test_a_snapshot_that_is_not_there_any_more_covers_nothing() -> None:
    assert planned(FULL, name(300), verified=(name(300), name(800))).purge_up_to == 300


def test_a_snapshot_of_another_log_purges_nothing() -> None:
    assert planned(FULL, name(901), verified=(name(901),)).purge_up_to == 0
    assert planned(FULL, name(300), verified=(name(300),), others=(name(300),)).purge_up_to == 0


# ---------------------------------------------------------------- delete


def test_what_covers_only_what_the_log_has_not_any_more_goes() -> None:
    names = name(50), name(99), name(100), name(500), name(600)
    assert planned(FULL, *names).delete == (name(99), name(50))


def test_the_newest_two_stay_whatever_they_cover() -> None:
    assert planned(FULL, name(10), name(20)).delete == ()
    assert planned(FULL, name(10), name(20), name(30)).delete == (name(10),)


def test_what_is_of_another_log_goes_before_what_is_of_this_one() -> None:
    assert planned(FULL, name(901), name(500), name(600)).delete == (name(901),)
    assert planned(FULL, name(901), name(902), name(10)).delete == (name(901),)
    assert planned(FULL, name(700), name(500), name(600), others=(name(700),)).delete == (name(700),)


# ---------------------------------------------------------------- cold start, and room for a new one


def test_a_cold_start_tries_what_covers_most_first_and_nothing_of_another_log() -> None:
    assert to_try(FULL, [name(50), name(901), name(600, age_s=9), name(600)]) == [
        name(600),
        name(600, age_s=9),
        name(50),
    ]


def test_what_may_go_for_room_is_all_but_the_newest_those_of_another_log_first() -> None:
    assert to_give_up(FULL, [name(600), name(50), name(500), name(950)]) == [name(950), name(50), name(500)]
    assert to_give_up(FULL, [name(600), name(50), name(700)], (name(700),)) == [name(700), name(50)]
    assert to_try(FULL, [name(600), name(50), name(700)], (name(700),)) == [name(600), name(50)]
    assert (to_give_up(FULL, [name(600)]), to_give_up(FULL, [])) == ([], [])


seqs = st.integers(0, 60)


@given(
    log=st.builds(
        lambda first, messages, size: LogExtent(first, first + messages - 1, size if messages else 0),
        st.integers(1, 40),
        st.integers(0, 40),
        st.integers(1, 2000),
    ),
    snapshots=st.lists(st.tuples(seqs, st.integers(0, 2000), st.booleans()), max_size=8),
)
def test_whatever_there_is_a_cold_start_goes_on_where_the_log_begins(
    log: LogExtent, snapshots: list[tuple[int, int, bool]]
) -> None:
    names = {name(seq, age_s): verified for seq, age_s, verified in snapshots}
    verified = [each for each, is_verified in names.items() if is_verified]
    done = plan(log, names, NOW_S * S, LIMITS, verified=verified)
    left = names.keys() - set(done.delete)
    if done.purge_up_to:
        covering = [each for each in left & set(verified) if int(each[:20]) == done.purge_up_to]
        assert covering, "what was purged is covered by a snapshot that was read back, and stays"
        assert log.first_seq <= done.purge_up_to <= log.last_seq
    assert len(left) >= min(2, len(names))
    assert set(to_try(log, names)[:2]) <= left
