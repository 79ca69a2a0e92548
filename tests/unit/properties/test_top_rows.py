"""The sketch of the most requested names keeps its bounds, whatever the order of the names."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.attribution.savings import Sums
from router.attribution.top_rows import NamedRow, TopRows

NAMES = st.lists(st.sampled_from("abcdefghijkl"), max_size=200)


def saving(tokens: int) -> Sums:
    of_one = Sums()
    of_one.requests, of_one.prompt_tokens = 1, tokens
    return of_one


def counted(top: TopRows, names: list[str]) -> TopRows:
    for at, name in enumerate(names):
        top.count(name, saving(at))
    return top


def check(top: TopRows, names: list[str], rows_max: int) -> None:
    """Compare the sketch with exact counts."""
    exact, rows = Counter(names), {row.name: row for row in top.rows()}
    assert len(rows) <= rows_max
    assert top.absent_max <= len(names) / rows_max
    for name, requests in exact.items():
        row = rows.get(name)
        if row is None:
            assert requests <= top.absent_max
        else:
            assert row.sums.requests <= requests <= row.requests_max
            assert row.missed <= len(names) / rows_max
    assert sum(row.sums.requests for row in rows.values()) + top.other.requests == len(names)
    tokens = sum(row.sums.prompt_tokens for row in rows.values()) + top.other.prompt_tokens
    assert tokens == sum(range(len(names)))


@given(NAMES, st.integers(1, 12))
def test_rows_and_bounds_agree_with_exact_counts(names: list[str], rows_max: int) -> None:
    check(counted(TopRows(rows_max), names), names, rows_max)


def forgets_what_was_missed(top: TopRows) -> None:
    """Let new rows begin as if their names had had no request before."""
    for row in top.rows():
        row.missed = 0


@pytest.mark.planted
def test_a_planted_bug_of_the_sketch_is_found() -> None:
    names, top = list("aabbccddaabbccdd"), TopRows(2)
    for at, name in enumerate(names):
        top.count(name, saving(at))
        forgets_what_was_missed(top)
    with pytest.raises(AssertionError):
        check(top, names, 2)


def test_a_row_is_named_and_counts_from_its_beginning() -> None:
    top = counted(TopRows(1), ["a", "a", "b"])
    (row,) = top.rows()
    assert isinstance(row, NamedRow)
    assert (row.name, row.sums.requests, row.missed, top.other.requests, top.absent_max) == ("b", 1, 2, 2, 3)
