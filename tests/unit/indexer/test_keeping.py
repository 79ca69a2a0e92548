"""What a keeper of snapshots should do now: every rule, and what must not be lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.service.retention import KeepingLimits, LogExtent, Retention, SnapshotName

S = 10**9
NOW_S = 10_000
LIMITS = KeepingLimits(period_s=300.0, log_bytes_max=1000)


QUIET = LogExtent(1, 100, 100)
"""A log with room to spare: one byte a message."""
FULL = LogExtent(101, 900, 800)


def name(stream_seq: int, age_s: float = 0.0) -> str:
    return str(SnapshotName(stream_seq, round((NOW_S - age_s) * S)))


def kept(log: LogExtent, *names: str, others: tuple[str, ...] = ()) -> Retention:
    return Retention(log, names, LIMITS, others)


def to_try(log: LogExtent, *names: str, others: tuple[str, ...] = ()) -> list[str]:
    return [str(each) for each in kept(log, *names, others=others).of_this_log]


def test_a_name_says_the_place_and_the_time_and_sorts_by_them() -> None:
    assert str(SnapshotName(17, 5)) == "00000000000000000017-00000000000000000005"
    assert SnapshotName.read(str(SnapshotName(17, 5))) == SnapshotName(17, 5)
    assert str(SnapshotName(9, 8)) < str(SnapshotName(10, 1)) < str(SnapshotName(10, 2))


@pytest.mark.parametrize("text", ["", "x", "17-5", f"{name(1)}x", f"x{name(1)}", name(1).replace("-", "_"), "٣" * 41])
def test_other_names_are_not_snapshots(text: str) -> None:
    assert SnapshotName.read(text) is None
    found = kept(QUIET, text, text)
    assert found.is_due(NOW_S * S)
    assert (found.of_this_log, found.useless(), found.to_give_up()) == ([], [], [])


# ---------------------------------------------------------------- write

GROWN = LogExtent(1, 700, 700)
PURGED = LogExtent(500, 699, 200)


@pytest.mark.parametrize(
    ("why", "log", "names", "others", "is_written"),
    [
        ("there is nothing to cover", LogExtent(1, 0, 0), (), (), False),
        ("there is something, and no snapshot", LogExtent(1, 1, 1), (), (), True),
        ("the newest is younger than the period", QUIET, (name(50, 299),), (), False),
        ("the newest is as old as the period", QUIET, (name(50, 300),), (), True),
        ("an older one is older than the period", QUIET, (name(50, 299), name(40, 900)), (), False),
        ("the newest covers all", QUIET, (name(100, 900),), (), False),
        ("the newest covers all but one", QUIET, (name(99, 900),), (), True),
        ("the log grew by a quarter of its limit", GROWN, (name(450),), (), False),
        ("the log grew by more than a quarter", GROWN, (name(449),), (), True),
        ("the covered part is gone: what is left counts", PURGED, (name(10),), (), False),
        ("more than a quarter is left", PURGED._replace(bytes_now=251), (name(10),), (), True),
        ("another writer's clock is a little ahead", QUIET, (name(50, -299),), (), False),
        ("the clock was set back", QUIET, (name(50, -300),), (), True),
        ("the snapshot is beyond the log", QUIET, (name(101),), (), True),
        ("one is beyond the log, and one is not", QUIET, (name(101), name(50)), (), False),
        ("it is of this log", QUIET, (name(100),), (), False),
        ("it is known to be of another log", QUIET, (name(100),), (name(100),), True),
        ("one is of another log, and one is not", QUIET, (name(100), name(50)), (name(100),), False),
    ],
)
def test_one_is_written_when_there_is_reason(
    why: str, log: LogExtent, names: tuple[str, ...], others: tuple[str, ...], is_written: bool
) -> None:
    assert kept(log, *names, others=others).is_due(NOW_S * S) is is_written, why


# ---------------------------------------------------------------- purge

OLD, MANY = (name(200), name(300)), (name(300), name(400), name(500), name(899))


@pytest.mark.parametrize(
    ("why", "log", "names", "verified", "others", "up_to"),
    [
        ("none was read back", FULL, (name(800),), (), (), 0),
        ("one was read back", FULL, (name(800), name(400)), (name(400),), (), 400),
        ("three quarters of the limit", GROWN._replace(last_seq=750, bytes_now=750), (name(700),), (name(700),), (), 0),
        ("more of the limit", GROWN._replace(last_seq=750, bytes_now=751), (name(700),), (name(700),), (), 700),
        ("half of the limit stays", FULL, MANY, MANY, (), 400),
        ("none leaves half: the newest", FULL, OLD, OLD, (), 300),
        ("it is gone already", FULL, (name(100),), (name(100),), (), 0),
        ("it is the first", FULL, (name(101),), (name(101),), (), 101),
        ("one is not there any more", FULL, (name(300),), (name(300), name(800)), (), 300),
        ("it is beyond the log", FULL, (name(901),), (name(901),), (), 0),
        ("it is of another log", FULL, (name(300),), (name(300),), (name(300),), 0),
    ],
)
def test_what_is_covered_is_purged_and_no_more(
    why: str,
    log: LogExtent,
    names: tuple[str, ...],
    verified: tuple[str, ...],
    others: tuple[str, ...],
    up_to: int,
) -> None:
    assert kept(log, *names, others=others).purge_up_to(verified) == up_to, why


# ---------------------------------------------------------------- delete


@pytest.mark.parametrize(
    ("why", "places", "others", "deleted"),
    [
        ("covers only what is gone", (50, 99, 100, 500, 600), (), (99, 50)),
        ("the newest two stay", (10, 20), (), ()),
        ("the oldest of three goes", (10, 20, 30), (), (10,)),
        ("beyond the log", (901, 500, 600), (), (901,)),
        ("beyond the log goes before what is gone", (901, 902, 10), (), (901,)),
        ("of another log", (700, 500, 600), (700,), (700,)),
    ],
)
def test_what_is_of_no_use_is_deleted(
    why: str, places: tuple[int, ...], others: tuple[int, ...], deleted: tuple[int, ...]
) -> None:
    found = kept(FULL, *map(name, places), others=tuple(map(name, others)))
    assert found.useless() == [*map(name, deleted)], why


# ---------------------------------------------------------------- cold start, and room for a new one


def test_a_cold_start_tries_what_covers_most_first_and_nothing_of_another_log() -> None:
    found = to_try(FULL, name(50), name(901), name(600, age_s=9), name(600))
    assert found == [name(600), name(600, age_s=9), name(50)]


def test_what_may_go_for_room_is_all_but_the_newest_those_of_another_log_first() -> None:
    assert kept(FULL, name(600), name(50), name(500), name(950)).to_give_up() == [name(950), name(50), name(500)]
    with_other = kept(FULL, name(600), name(50), name(700), others=(name(700),))
    assert with_other.to_give_up() == [name(700), name(50)]
    assert [str(each) for each in with_other.of_this_log] == [name(600), name(50)]
    assert (kept(FULL, name(600)).to_give_up(), kept(FULL).to_give_up()) == ([], [])


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
    found = kept(log, *names)
    left, up_to = names.keys() - set(found.useless()), found.purge_up_to(verified)
    if up_to:
        covering = [each for each in left & set(verified) if int(each[:20]) == up_to]
        assert covering, "what was purged is covered by a snapshot that was read back, and stays"
        assert log.first_seq <= up_to <= log.last_seq
    assert len(left) >= min(2, len(names))
    assert set(to_try(log, *names)[:2]) <= left
