"""Merges layers of engine arguments and keeps for each value which layer it is from.

A layer is a tree: a mapping whose keys are texts is a section; all else (a number, a list, null, any other mapping) is
a value, which is taken or replaced whole. What `merge` puts at one name:

    lower   upper: absent   value   section                      cut section
    absent         -        upper   upper                        upper
    value          lower    upper   upper, from now on cut       upper
    section        lower    upper   both, name by name           upper

A section that came over a value is *cut*: it lets nothing through of what lies deeper still. So merging is associative,
and layers can be merged in any grouping: `{x: {a: 1}}`, `{x: 5}`, `{x: {b: 2}}` make `{x: {b: 2}}` either way.

    merge(merge(a, b), c) == merge(a, merge(b, c))          merge({}, a) == a == merge(a, {})
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, get_args

import msgspec

LayerName = Literal["default", "flag", "file", "override", "forced"]
LAYERS: tuple[LayerName, ...] = get_args(LayerName)
"""From the one that gives way to all to the one that gives way to none."""

Path = tuple[str, ...]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one source. `places` has their locations by path; a missing path has the location of its parent."""

    name: LayerName
    values: Mapping[str, Any]
    place: str
    places: Mapping[Path, str] = {}

    def place_of(self, path: Path) -> str:
        """Return where the source says what is at `path`."""
        longest = next((path[:size] for size in range(len(path), 0, -1) if path[:size] in self.places), None)
        return self.place if longest is None else self.places[longest]


class Origin(msgspec.Struct, frozen=True):
    """The layer of a value, and the place in it: a file's line, a flag, the reason for a forced value."""

    layer: LayerName
    place: str

    def __str__(self) -> str:
        return self.layer if self.layer == self.place else f"{self.layer} ({self.place})"


class Value(msgspec.Struct, frozen=True):
    """A leaf of the tree."""

    found: Any
    origin: Origin


class Section(msgspec.Struct, frozen=True):
    """A branch of the tree; `origin` is the last layer that names it."""

    below: dict[str, "Value | Section"]
    origin: Origin
    is_cut: bool = False


Tree = dict[str, Value | Section]


class Setting(msgspec.Struct, frozen=True):
    """An effective value, an empty section being one too."""

    path: Path
    value: Any
    origin: Origin

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


class Replacement(msgspec.Struct, frozen=True):
    """A layer replaced the value of a lower one."""

    path: Path
    old: Any
    new: Any
    old_origin: Origin
    new_origin: Origin

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Return the path as it is written: `a.b.c`; a name that has a dot itself, or is empty, stands in quotes."""
    return ".".join(json.dumps(name) if "." in name or not name else name for name in path)


def is_section(value: object) -> bool:
    """Whether a layer's mapping is merged name by name."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def tree_of(layer: Layer) -> Tree:
    """Return the layer as a tree; its values are the layer's own, of which `plain` and `settings` give copies."""

    def nodes(values: Mapping[str, Any], above: Path) -> Tree:
        return {name: node(value, (*above, name)) for name, value in values.items()}

    def node(value: Any, path: Path) -> Value | Section:  # noqa: ANN401 - whatever YAML and JSON can say
        origin = Origin(layer.name, layer.place_of(path))
        return Section(nodes(value, path), origin) if is_section(value) else Value(value, origin)

    return nodes(layer.values, ())


def merge(lower: Tree, upper: Tree) -> Tree:
    """Return the table's tree; neither argument is changed."""
    return {**lower, **{name: _over(lower.get(name), node) for name, node in upper.items()}}


def _over(lower: Value | Section | None, upper: Value | Section) -> Value | Section:
    if lower is None or isinstance(upper, Value) or upper.is_cut:
        return upper
    if isinstance(lower, Value):
        return Section(upper.below, upper.origin, is_cut=True)
    return Section(merge(lower.below, upper.below), upper.origin, lower.is_cut)


def replacements(lower: Tree, upper: Tree, above: Path = ()) -> Iterator[Replacement]:
    """Yield what merging `upper` over `lower` replaces with something else; saying the same again replaces nothing."""
    for name, node in upper.items():
        under = lower.get(name)
        if isinstance(under, Section) and isinstance(node, Section) and not node.is_cut:
            yield from replacements(under.below, node.below, (*above, name))
        elif under is not None:
            old, new = plain(under), plain(node)
            if type(old) is not type(new) or old != new:
                yield Replacement((*above, name), old, new, under.origin, node.origin)


def without(tree: Tree, path: Path) -> Tree:
    """Return the tree without what is at `path`; a section that is left empty stays."""
    name, *deeper = path
    node = tree.get(name)
    if not deeper:
        return {other: kept for other, kept in tree.items() if other != name}
    if not isinstance(node, Section):
        return tree
    return {**tree, name: Section(without(node.below, tuple(deeper)), node.origin, node.is_cut)}


def node_at(tree: Tree, path: Path) -> Value | Section | None:
    """Return what is at `path`; None where nobody says anything."""
    name, *deeper = path
    node = tree.get(name)
    if not deeper:
        return node
    return node_at(node.below, tuple(deeper)) if isinstance(node, Section) else None


def at(tree: Tree, *path: str) -> Any:  # noqa: ANN401 - whatever the argument is
    """Return a copy of the value at `path`, a section as a mapping; None where nobody says anything, or null."""
    node = node_at(tree, path)
    return None if node is None else plain(node)


def settings(tree: Tree) -> tuple[Setting, ...]:
    """Return every value with its path and origin, by path."""

    def walk(below: Tree, above: Path) -> Iterator[Setting]:
        for name, node in sorted(below.items()):
            path = (*above, name)
            if isinstance(node, Section) and node.below:
                yield from walk(node.below, path)
            else:
                yield Setting(path, plain(node), node.origin)

    return tuple(walk(tree, ()))


def plain(node: Value | Section) -> Any:  # noqa: ANN401
    """Return what the node means as YAML and JSON do, in a copy of its own."""
    if isinstance(node, Section):
        return {name: plain(inner) for name, inner in node.below.items()}
    return deepcopy(node.found)


def nested(effective: tuple[Setting, ...]) -> dict[str, Any]:
    """Return the settings as one mapping of mappings that shares nothing with them."""
    values: dict[str, Any] = {}
    for setting in effective:
        *above, last = setting.path
        inner = values
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = deepcopy(setting.value)
    return values
