"""The last layer that names a path wins, its origin says so, and no input mapping changes."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine_args.layers import (
    LAYERS,
    Layer,
    LayerName,
    Path,
    Tree,
    ValueOrigin,
    dotted,
    is_section,
    merge,
    plain,
    replacements,
    tree_of,
)
from worker_agent.engine_args.layers import settings as settings_of

NAMES = st.sampled_from(["a", "a", "a", "b", "a.b", ""])  # few, so that layers meet
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(0, 2), st.just([1, {"a": 2}]), st.just({1: 2})
)
SECTIONS = st.dictionaries(NAMES, st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)))


def layer(name: LayerName, values: dict[str, Any], **places: str) -> Layer:
    at = {tuple(path.split("__")): place for path, place in places.items()}
    return Layer(name=name, values=values, place=name, places=at)


def layers_of(sections: list[dict[str, Any]]) -> list[Layer]:
    return [layer(LAYERS[number % len(LAYERS)], values) for number, values in enumerate(sections)]


def merged(layers: list[Layer]) -> Tree:
    whole: Tree = {}
    for one in layers:
        whole = merge(whole, tree_of(one))
    return whole


def told(sections: list[dict[str, Any]]) -> dict[Path, tuple[Any, str]]:
    """The rule, without a tree: a list of paths, of which a later one strikes out what it contradicts."""
    table: dict[Path, tuple[Any, str]] = {}
    for one in layers_of(sections):
        for path, value in leaves(one.values, ()):
            under = [other for other in table if other[: len(path)] == path and other != path]
            if value == {} and is_section(value) and under:
                continue
            above = [path[:size] for size in range(1, len(path))]
            table = {other: kept for other, kept in table.items() if other not in under and other not in above}
            table[path] = (value, one.name)
    return table


def leaves(values: Any, above: Path) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for name, value in values.items():
        path = (*above, name)
        found += leaves(value, path) if is_section(value) and value else [(path, value)]
    return found


@given(SECTIONS)
def test_nothing_is_neutral_on_both_sides(values: dict[str, Any]) -> None:
    tree = tree_of(layer("file", values))
    assert merge({}, tree) == tree == merge(tree, {})


@given(st.lists(SECTIONS, max_size=5))
def test_the_last_layer_that_names_a_path_wins_and_is_its_origin(sections: list[dict[str, Any]]) -> None:
    whole = merged(layers_of(sections))
    assert {each.path: (each.value, each.origin.layer) for each in settings_of(whole)} == told(sections)


@given(st.lists(SECTIONS, max_size=4))
def test_no_mapping_of_a_layer_is_changed_or_shared(sections: list[dict[str, Any]]) -> None:
    before, whole = deepcopy(sections), merged(layers_of(sections))
    scribble(values_of(whole))
    assert sections == before
    assert values_of(whole) == values_of(merged(layers_of(sections)))


def values_of(tree: Tree) -> dict[str, Any]:
    return {name: plain(node) for name, node in tree.items()}


def scribble(value: Any) -> None:
    for inner in list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()):
        scribble(inner)
    if isinstance(value, dict):
        value["scribbled"] = True
    elif isinstance(value, list):
        value.append("scribbled")


@given(SECTIONS, SECTIONS)
def test_a_replacement_is_told_exactly_where_a_lower_value_is_gone(low: dict[str, Any], high: dict[str, Any]) -> None:
    lower, upper = tree_of(layer("file", low)), tree_of(layer("override", high))
    gone = set()
    after = {each.path: each.value for each in settings_of(merge(lower, upper))}
    for each in settings_of(lower):
        kept = after.get(each.path, "gone")
        if not (type(kept) is type(each.value) and kept == each.value):
            gone.add(each.path)
    heads = {told.path for told in replacements(lower, upper)}
    filled = {path for path in gone if nothing_there(low, path)}  # an empty section that was filled lost nothing
    assert {path for path in gone - filled if not any(path[: len(head)] == head for head in heads)} == set()
    assert all(any(path[: len(head)] == head for path in gone) for head in heads)


def nothing_there(values: Any, path: Path) -> bool:
    for name in path:
        values = values[name]
    return bool(values == {} and is_section(values))


def test_a_value_between_two_sections_keeps_the_lower_one_out() -> None:
    whole = merged(layers_of([{"x": {"a": 1}}, {"x": None}, {"x": {"b": 2}}]))
    assert values_of(whole) == {"x": {"b": 2}}


def test_a_replacement_names_path_values_and_origins() -> None:
    lower = tree_of(layer("file", {"kv": {"dtype": "fp8", "reuse": True}}, kv__dtype="e.yaml:3"))
    upper = tree_of(layer("override", {"kv": {"dtype": "auto", "reuse": True}}))
    (told,) = replacements(lower, upper)
    assert (told.name, told.old, told.new) == ("kv.dtype", "fp8", "auto")
    assert (str(told.old_origin), str(told.new_origin)) == ("file (e.yaml:3)", "override")


@pytest.mark.parametrize(("old", "new"), [(True, 1), (1, 1.0), (0, False), (None, {}), ({}, None)])
def test_another_type_is_another_value(old: Any, new: Any) -> None:
    lower, upper = tree_of(layer("file", {"x": old})), tree_of(layer("override", {"x": new}))
    assert [told.path for told in replacements(lower, upper)] == [("x",)]


def test_a_path_without_a_place_is_where_the_one_above_it_is() -> None:
    one = layer("file", {"a": {"b": {"c": 1}}, "d": 2}, a="f:1", a__b="f:2")
    assert [each.origin for each in settings_of(tree_of(one))] == [
        ValueOrigin("file", "f:2"),
        ValueOrigin("file", "file"),
    ]


def test_settings_stand_by_path_whatever_the_order_of_the_layers_names() -> None:
    tree = tree_of(layer("file", {"b": 1, "a": {"d": 1, "c": {}}}))
    assert [each.name for each in settings_of(tree)] == ["a.c", "a.d", "b"]


def test_a_name_with_a_dot_stands_in_quotes() -> None:
    assert dotted(("a", "b.c", "")) == 'a."b.c".""'
