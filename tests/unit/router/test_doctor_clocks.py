"""What a `Date` tells of a clock: never more than is true, and all that is certain."""

from hypothesis import given
from hypothesis import strategies as st

from router.doctor.clocks import DATE_RESOLUTION_S, SKEW_MAX_S, ClockReading, clock_findings, narrowed, reading

NOW_S = 1_800_000_000.0
seconds = st.floats(0, 0.999, allow_nan=False)
skews = st.floats(-50, 50, allow_nan=False)


def asked(ahead_s: float, way_s: float, kept_s: float, back_s: float, at_s: float = NOW_S) -> ClockReading:
    """A server so far ahead is asked: it answers with the whole second that it made its header of, `kept_s` ago."""
    date_s = float(int(at_s + way_s + ahead_s - kept_s))
    return reading("h", date_s, at_s, at_s + way_s + back_s)


@given(skews, seconds, seconds, seconds)
def test_the_truth_is_never_left_out(ahead_s: float, way_s: float, kept_s: float, back_s: float) -> None:
    told = asked(ahead_s, way_s, kept_s, back_s)
    assert told.least_s - 1e-6 <= ahead_s <= told.most_s + 1e-6


@given(skews, seconds, seconds, seconds)
def test_a_clock_is_blamed_only_and_always_where_it_is_certain(
    ahead_s: float, way_s: float, kept_s: float, back_s: float
) -> None:
    found = list(clock_findings([asked(ahead_s, way_s, kept_s, back_s)]))
    if found:
        assert abs(ahead_s) > SKEW_MAX_S - 1e-6
    if abs(ahead_s) > SKEW_MAX_S + DATE_RESOLUTION_S + way_s + back_s:
        assert [each.of for each in found] == ["h"]


def test_answers_of_one_host_narrow_what_is_known_of_it() -> None:
    two = narrowed([ClockReading("h", -1.0, 1.5), ClockReading("h", -0.5, 1.7), ClockReading("i", 0, 1)])
    assert two == (ClockReading("h", -0.5, 1.5), ClockReading("i", 0, 1))


def test_of_a_clock_that_was_set_meanwhile_the_later_answer_counts() -> None:
    assert narrowed([ClockReading("h", 0, 1), ClockReading("h", 5, 6)]) == (ClockReading("h", 5, 6),)


def test_two_hosts_near_ours_may_be_far_from_each_other() -> None:
    (found,) = clock_findings([ClockReading("a", 0.9, 2.9), ClockReading("b", -2.5, -0.5)])
    assert (found.of, found.found) == ("a", "it is 1.4 s or more ahead of b (2 s are uncertain)")


def test_where_all_differ_it_is_this_machine() -> None:
    (found,) = clock_findings([ClockReading("a", 8, 10), ClockReading("b", 8.5, 9)])
    assert found.of == "this machine"
    assert found.found == (
        "all 2 hosts differ from it: a 8.0 s or more ahead of it, b 8.5 s or more ahead of it (2 s are uncertain)"
    )
