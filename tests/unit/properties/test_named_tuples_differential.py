"""Named tuples that C++ makes equal those of `__new__`, for any call; and so do the errors."""

import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from router.native import built, make_named_tuples_directly

NAMES = ("a", "b", "c", "d", "e", "f")
Made = Callable[..., tuple[Any, ...]]


def directly(made: Any) -> Any:
    built.make_directly(made)
    return made


def classes(fields: int, defaults: int) -> tuple[Any, Any]:
    """Return two equal classes, the second of which C++ makes."""
    values = [f"default {at}" for at in range(defaults)]
    ordinary, direct = (namedtuple("Found", NAMES[:fields], defaults=values) for _ in range(2))  # noqa: PYI024 - drawn
    return ordinary, directly(direct)


def outcome(made: Made, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...] | str:
    try:
        found = made(*args, **named)
    except TypeError as error:
        return str(error)
    assert type(found) is made
    return tuple(found)


@given(
    st.integers(0, 6).flatmap(lambda fields: st.tuples(st.just(fields), st.integers(0, fields))),
    st.lists(st.integers(), max_size=7).map(tuple),
    st.dictionaries(st.sampled_from([*NAMES, "unknown"]), st.text(max_size=3)),
)
def test_a_call_gives_the_same(shape: tuple[int, int], args: tuple[int, ...], named: dict[str, str]) -> None:
    ordinary, direct = classes(*shape)
    assert outcome(direct, args, named) == outcome(ordinary, args, named)


@given(st.permutations(NAMES), st.integers(0, 6))
def test_names_may_come_in_any_order_and_need_not_be_interned(names: list[str], positional: int) -> None:
    _, direct = classes(6, 0)
    kept = NAMES[:positional]
    named = {"".join([*name, ""]): name for name in names if name not in kept}
    assert tuple(direct(*kept, **named)) == NAMES


class Pair(NamedTuple):
    left: object
    right: object = None

    def both(self) -> list[object]:
        return [self.left, self.right]


class Child(Pair):
    def __new__(cls, left: object) -> Self:
        return super().__new__(cls, left, "of the child")


def test_methods_copies_and_subclasses_stay() -> None:
    made = directly(Pair)
    assert made(1, right=2).both() == [1, 2]
    assert made(1)._replace(left=3) == made._make((3, None)) == (3, None)
    assert Child("x") == ("x", "of the child")
    assert repr(made("x")) == "Pair(left='x', right=None)"


def test_no_reference_is_lost_or_kept() -> None:
    made, value = directly(Pair), object()
    calls: list[Callable[[], object]] = [
        lambda: made(value),
        lambda: made(value, value),
        lambda: made(left=value, right=value),
        lambda: made(right=value, left=value),
        lambda: outcome(made, (value, value, value), {}),
        lambda: outcome(made, (value,), {"left": value}),
        lambda: outcome(made, (), {"right": value}),
    ]
    before = sys.getrefcount(value), sys.getrefcount(None)
    for _ in range(1000):
        for call in calls:
            call()
    after = sys.getrefcount(value), sys.getrefcount(None)
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) < 1000, "a call would lose or keep one each"


def test_only_classes_of_named_tuples_are_accepted() -> None:
    for other in (tuple, int, object):
        with pytest.raises(TypeError, match="a class of named tuples is needed"):
            directly(other)


def test_the_projects_named_tuples_are_made_directly() -> None:
    make_named_tuples_directly()
    assert (WorkerRank("w", dp_rank=3), str(WorkerRank("w", 3))) == (("w", 3), "w/3")
    with pytest.raises(TypeError, match="dp_rank"):
        WorkerRank("w")  # type: ignore[call-arg]
