"""The sketch of the most requested names keeps its bounds, whatever the order of the names."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.attribution.report import Rows, top_rows
from router.decision.policy import Policy
from router.native import built
from tests.support.decide import decide
from tests.unit.router.samples import route, row, view

NAMES = st.lists(st.sampled_from("abcdefghijkl"), max_size=200)
OF_TENANTS = {
    name: decide(view(row()), route(100, decision_id="d", tenant=name), Policy(), 1) for name in "abcdefghijkl"
}


def counted(names: list[str], rows_max: int) -> Rows:
    """Return the rows of requests of these tenants; request n reuses n tokens."""
    found = built.Attribution(rows_max, family_blocks=4, pending_max=9)
    for at, name in enumerate(names):
        found.decided(OF_TENANTS[name])
        found.ended("d", is_ok=True, cached_tokens=min(at, 100))
    return top_rows(found, "tenant")


def check(top: Rows, names: list[str], rows_max: int) -> None:
    """Compare the sketch with exact counts."""
    exact, rows = Counter(names), {each.name: each for each in top.rows}
    assert len(rows) <= rows_max
    assert top.absent_requests_max <= len(names) / rows_max
    for name, requests in exact.items():
        if (each := rows.get(name)) is None:
            assert requests <= top.absent_requests_max
        else:
            assert each.requests <= requests <= each.requests + each.missed_requests_max
            assert each.missed_requests_max <= len(names) / rows_max
    assert sum(each.requests for each in top.rows) + top.other.requests == len(names)
    tokens = sum(each.reused_tokens for each in top.rows) + top.other.reused_tokens
    assert tokens == sum(min(at, 100) for at in range(len(names)))


@given(NAMES, st.integers(1, 12))
def test_rows_and_bounds_agree_with_exact_counts(names: list[str], rows_max: int) -> None:
    check(counted(names, rows_max), names, rows_max)


@pytest.mark.planted
def test_a_planted_bug_of_the_sketch_is_found() -> None:
    names = list("aabbccddaabbccdd")
    top = counted(names, 2)
    forgetful = replace(top, rows=tuple(replace(each, missed_requests_max=0) for each in top.rows))
    with pytest.raises(AssertionError):
        check(forgetful, names, 2)


def test_a_row_is_named_and_counts_from_its_beginning() -> None:
    top = counted(["a", "a", "b"], 1)
    (found,) = top.rows
    assert (found.name, found.requests, found.missed_requests_max, top.other.requests, top.absent_requests_max) == (
        "b",
        1,
        2,
        2,
        3,
    )


def test_of_several_with_fewest_requests_the_eldest_gives_way() -> None:
    assert [each.name for each in counted(["a", "b", "b", "c", "d"], 3).rows] == ["b", "c", "d"]
