"""Describes the allowed values of a request's field, in JSON terms.

Only refused requests need this: a type is inspected when its first error is explained.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec.inspect as types

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.|key)\]")
_NOUNS: dict[type[types.Type], tuple[str, str]] = {
    types.BoolType: ("true or false", "true or false"),
    types.IntType: ("a whole number", "whole numbers"),
    types.FloatType: ("a number", "numbers"),
    types.StrType: ("a string", "strings"),
    types.DictType: ("an object", "objects"),
    types.StructType: ("an object", "objects"),
}


def allowed_at(kind: Any, path: str) -> str:  # noqa: ANN401 - a type as msgspec takes it
    """Return what `kind` allows at `path` (msgspec's, without `$`); empty if it has no such path."""
    found = [_inspected(kind)]
    for key, index in _STEP.findall(path):
        found = [inner for each in found for outer in _members(each) for inner in _below(outer, key, index)]
    return " or ".join(dict.fromkeys(_words(each) for each in found))


@cache
def _inspected(kind: Any) -> types.Type:  # noqa: ANN401 - a type as msgspec takes it
    return types.type_info(kind)


def _members(kind: types.Type) -> Iterable[types.Type]:
    """Return the members of a union, or the type itself."""
    if isinstance(kind, types.Metadata):
        return _members(kind.type)
    return kind.types if isinstance(kind, types.UnionType) else (kind,)


def _below(kind: types.Type, key: str, index: str) -> Iterable[types.Type]:
    """Yield the types of a value's field `key`, or of its items; `index` may be "key": those of its keys."""
    if isinstance(kind, types.StructType) and key:
        if kind.tag_field == key:
            yield types.LiteralType((kind.tag,))
        yield from (field.type for field in kind.fields if field.encode_name == key)
    elif isinstance(kind, types.ListType) and index:
        yield kind.item_type
    elif isinstance(kind, types.DictType):
        yield kind.key_type if index == "key" else kind.value_type


def _words(kind: types.Type) -> str:
    """Describe the allowed values other than null."""
    words: list[str] = []
    for each in _members(kind):
        if isinstance(each, types.LiteralType):
            words += map(json.dumps, each.values)
        elif isinstance(each, types.ListType):
            items = " or ".join(_noun(item, 1) + _in_brackets(_range(item)) for item in _members(each.item_type))
            words.append(f"a list of {items}{_after(_span(each.min_length, each.max_length, 'items'))}")
        elif not isinstance(each, types.NoneType):
            words.append(_noun(each, 0) + _after(_range(each)))
    return " or ".join(dict.fromkeys(words)) or "null"


def _noun(kind: types.Type, form: int) -> str:
    if isinstance(kind, types.LiteralType):
        return " or ".join(map(json.dumps, kind.values))
    return _NOUNS.get(type(kind), ("any value", "any values"))[form]


def _range(kind: types.Type) -> str:
    if isinstance(kind, types.IntType | types.FloatType):
        return _span(kind.ge, kind.le, "") if kind.gt is None else f"more than {_number(kind.gt)}"
    if isinstance(kind, types.StrType):
        return f"as {kind.pattern}" if kind.pattern else _span(kind.min_length, kind.max_length, "characters")
    return ""


def _span(low: float | None, high: float | None, unit: str) -> str:
    if low is None:
        return "" if high is None else f"up to {_number(high)} {unit}".rstrip()
    span = f"{_number(low)} or more" if high is None else f"{_number(low)}..{_number(high)}"
    return f"{span} {unit}".rstrip()


def _number(value: float) -> str:
    return str(value).removesuffix(".0")


def _after(text: str) -> str:
    return text and f", {text}"


def _in_brackets(text: str) -> str:
    return text and f" ({text})"
