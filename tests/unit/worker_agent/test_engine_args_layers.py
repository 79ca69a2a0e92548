"""The last layer that names a path wins, its origin says so, and no input mapping changes."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine_args.layers import LayerName, Values, dotted, layer, merge, nested

NAMES = st.sampled_from(["a", "a", "a", "b", "a.b", ""])  # few, so that layers meet
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(0, 2), st.just([1, {"a": 2}]), st.just({1: 2})
)
SECTIONS = st.dictionaries(NAMES, st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)))


def of(name: LayerName, values: dict[str, Any]) -> Values:
    return layer(name, [((), values, name)])


def merged(sections: list[dict[str, Any]]) -> dict[str, Any]:
    whole: Values = {}
    for each in sections:
        whole, _ = merge(whole, of("file", each))
    return nested({path: each.value for path, each in whole.items()})


def one_over_the_other(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """The rule for mappings."""
    whole = dict(lower)
    for name, value in upper.items():
        below = lower.get(name)
        both = all(isinstance(each, dict) and all(isinstance(key, str) for key in each) for each in (below, value))
        whole[name] = one_over_the_other(below or {}, value) if both else value
    return whole


@given(st.lists(SECTIONS, max_size=5))
def test_layers_are_merged_name_by_name_and_neither_changed_nor_shared(sections: list[dict[str, Any]]) -> None:
    before, expected = deepcopy(sections), dict[str, Any]()
    for each in sections:
        expected = one_over_the_other(expected, each)
    whole = merged(sections)
    assert whole == expected
    scribble(whole)
    assert sections == before


def scribble(value: Any) -> None:
    for inner in list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()):
        scribble(inner)
    if isinstance(value, dict):
        value["scribbled"] = True
    elif isinstance(value, list):
        value.append("scribbled")


@given(SECTIONS, SECTIONS)
def test_exactly_the_lower_values_that_are_gone_are_replaced(low: dict[str, Any], high: dict[str, Any]) -> None:
    lower = of("file", low)
    whole, replaced = merge(lower, of("override", high))
    gone = {
        path for path, old in lower.items() if repr(whole[path].value if path in whole else "gone") != repr(old.value)
    }
    filled = {path for path in gone if lower[path].value == {} and any(each[: len(path)] == path for each in whole)}
    assert {old.path for old, _ in replaced} - filled == gone - filled
    assert {each.layer for each in whole.values() if each.path in gone} <= {"override"}


def test_a_replacement_has_both_values_with_their_origins() -> None:
    lower = layer("file", [(("kv",), {"dtype": "fp8", "reuse": True}, "e.yaml:3")])
    _, ((old, new),) = merge(lower, of("override", {"kv": {"dtype": "auto", "reuse": True}}))
    assert (old.name, old.value, new.value) == ("kv.dtype", "fp8", "auto")
    assert (old.origin, new.origin) == ("file (e.yaml:3)", "override")


@pytest.mark.parametrize(("old", "new"), [(True, 1), (1, 1.0), (0, False), (None, {}), ({}, None)])
def test_another_type_is_another_value(old: Any, new: Any) -> None:
    _, replaced = merge(of("file", {"x": old}), of("override", {"x": new}))
    assert [told.path for told, _ in replaced] == [("x",)]


def test_a_name_with_a_dot_stands_in_quotes() -> None:
    assert dotted(("a", "b.c", "")) == 'a."b.c".""'
