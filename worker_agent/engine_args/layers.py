"""Merges layers of engine arguments and keeps for each value which layer it is from.

A layer is a tree: a mapping with only texts as keys is a section; anything else (a number, a list, null, any other
mapping) is a value, which is kept or replaced as a whole. The result of `merge` at one name:

    lower   upper: absent   value   section
    absent         -        upper   upper
    value          lower    upper   upper
    section        lower    upper   both, name by name

Layers are merged from the lowest to the highest, so a value between two sections keeps the lower one out.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, get_args

import msgspec

LayerName = Literal["default", "flag", "file", "override", "forced"]
LAYERS: tuple[LayerName, ...] = get_args(LayerName)
"""From the lowest to the highest; a higher layer replaces values of a lower one."""

Path = tuple[str, ...]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one source. `places` has their locations by path; a missing path has the location of its parent."""

    name: LayerName
    values: Mapping[str, Any]
    place: str
    places: Mapping[Path, str] = {}

    def place_of(self, path: Path) -> str:
        """Return the place in the source of the value at `path`."""
        longest = next((path[:size] for size in range(len(path), 0, -1) if path[:size] in self.places), None)
        return self.place if longest is None else self.places[longest]


class ValueOrigin(msgspec.Struct, frozen=True):
    """The layer of a value, and the place in it: a file's line, a flag, the reason for a forced value."""

    layer: LayerName
    place: str

    def __str__(self) -> str:
        return self.layer if self.layer == self.place else f"{self.layer} ({self.place})"


class Leaf(msgspec.Struct, frozen=True):
    """A leaf of the tree."""

    found: Any
    origin: ValueOrigin


class Branch(msgspec.Struct, frozen=True):
    """A branch of the tree; `origin` is the last layer that names it."""

    below: dict[str, "Leaf | Branch"]
    origin: ValueOrigin


Tree = dict[str, Leaf | Branch]


class EffectiveValue(msgspec.Struct, frozen=True):
    """An effective value; an empty section is one too."""

    path: Path
    value: Any
    origin: ValueOrigin

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


class Replacement(msgspec.Struct, frozen=True):
    """A layer replaced the value of a lower one."""

    path: Path
    old: Any
    new: Any
    old_origin: ValueOrigin
    new_origin: ValueOrigin

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Return the path as it is written: `a.b.c`; an empty name, or one with a dot, is quoted."""
    return ".".join(json.dumps(name) if "." in name or not name else name for name in path)


def is_section(value: object) -> bool:
    """Whether a layer's mapping is merged name by name."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def tree_of(layer: Layer) -> Tree:
    """Return the layer as a tree; its values are the layer's own, `plain` and `settings` return copies."""

    def nodes(values: Mapping[str, Any], above: Path) -> Tree:
        return {name: node(value, (*above, name)) for name, value in values.items()}

    def node(value: Any, path: Path) -> Leaf | Branch:  # noqa: ANN401 - whatever YAML and JSON can say
        origin = ValueOrigin(layer.name, layer.place_of(path))
        return Branch(nodes(value, path), origin) if is_section(value) else Leaf(value, origin)

    return nodes(layer.values, ())


def merge(lower: Tree, upper: Tree) -> Tree:
    """Return the table's tree; neither argument is changed."""
    whole = dict(lower)
    for name, node in upper.items():
        under = lower.get(name)
        if isinstance(under, Branch) and isinstance(node, Branch):
            whole[name] = Branch(merge(under.below, node.below), node.origin)
        else:
            whole[name] = node
    return whole


def replacements(lower: Tree, upper: Tree, above: Path = ()) -> Iterator[Replacement]:
    """Yield the replacements of merging `upper` over `lower`; an equal value is no replacement."""
    for name, node in upper.items():
        under = lower.get(name)
        if isinstance(under, Branch) and isinstance(node, Branch):
            yield from replacements(under.below, node.below, (*above, name))
        elif under is not None:
            old, new = plain(under), plain(node)
            if type(old) is not type(new) or old != new:
                yield Replacement((*above, name), old, new, under.origin, node.origin)


def node_at(tree: Tree, path: Path) -> Leaf | Branch | None:
    """Return the node at `path`; None if no layer has one."""
    name, *deeper = path
    node = tree.get(name)
    if not deeper:
        return node
    return node_at(node.below, tuple(deeper)) if isinstance(node, Branch) else None


def at(tree: Tree, *path: str) -> Any:  # noqa: ANN401 - whatever the argument is
    """Return a copy of the value at `path`, a section as a mapping; None if no layer has one, or it is null."""
    node = node_at(tree, path)
    return None if node is None else plain(node)


def settings(tree: Tree) -> tuple[EffectiveValue, ...]:
    """Return every value with its path and origin, by path."""

    def walk(below: Tree, above: Path) -> Iterator[EffectiveValue]:
        for name, node in sorted(below.items()):
            path = (*above, name)
            if isinstance(node, Branch) and node.below:
                yield from walk(node.below, path)
            else:
                yield EffectiveValue(path, plain(node), node.origin)

    return tuple(walk(tree, ()))


def plain(node: Leaf | Branch) -> Any:  # noqa: ANN401
    """Return a copy of the node as plain values, as YAML and JSON have them."""
    if isinstance(node, Branch):
        return {name: plain(inner) for name, inner in node.below.items()}
    return deepcopy(node.found)
