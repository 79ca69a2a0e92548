"""Values that a model writes as text become JSON, by the types that a tool's JSON schema gives its parameters.

    the schema's type      the value
    string, or none        a string, sent as it comes; `null` in any case of letters is null
    others                 as written, if it is JSON of one of the types (True, FALSE: a boolean); else a string.
                           It is sent at its end

Types also follow from `enum`, `const`, `properties` and `items`, from what `anyOf`, `oneOf` and `allOf` combine, and
from a `$ref` into the tool's own schema.
Source: JSON Schema 2020-12, core and validation; sgl-project/sglang, `python/sglang/srt/function_call/utils.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from worker_agent.api.parsers.reader import Show

Tool = Mapping[str, Any]

EXACT: frozenset[str] = frozenset()
"""Replaces the types of a value that is a string, whatever it looks like."""
ANY = frozenset({"any", "boolean"})
"""Replaces the types of a value that is JSON of any type."""
_NULL = "null"
_NESTED_MAX = 8  # levels of a schema that are read
_KINDS: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
}


class Value:
    """One parameter's value on its way into JSON."""

    def __init__(self, types: frozenset[str], show: Show) -> None:
        self._types, self._show = types, show
        self._parts, self._is_string = list[str](), False

    def add(self, text: str) -> None:
        """Take more of the value's text; show what is certain."""
        if self._is_string:
            self._show(quoted(text)[1:-1])
            return
        self._parts.append(text)
        may_be_null = self._types == {"string"} and _NULL.startswith("".join(self._parts).lower())
        if not may_be_null and self._types in (EXACT, {"string"}):
            self.cut()
            self._is_string = True

    def end(self) -> None:
        """Show the rest."""
        self._show('"' if self._is_string else json_of("".join(self._parts), self._types))

    def cut(self) -> None:
        """Show what was held back, as the beginning of a string; only `end` closes it."""
        if not self._is_string:
            self._show(quoted("".join(self._parts))[:-1])


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the text as it is, if it is JSON of one of the types; else as a JSON string."""
    bare = text.strip()
    lowered = bare.lower()
    if lowered == _NULL or (lowered in ("true", "false") and "boolean" in types):
        return lowered
    try:
        decoded = msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError):
        return quoted(text)
    is_of_type = "any" in types or types & (_KINDS[type(decoded)] - {"string"})
    return bare if is_of_type else quoted(text)


def types_of(tools: Sequence[Tool], function: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that the function's schema gives a parameter; `string` if it names none."""
    named = [tool["function"] for tool in tools if tool["function"]["name"] == function]
    schema = (named[0].get("parameters") if named else None) or {}
    properties = schema.get("properties")
    own = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_named_types(own, schema, _NESTED_MAX)) - {_NULL} or frozenset({"string"})


def quoted(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _named_types(schema: object, root: Mapping[str, Any], nested: int) -> Iterator[str]:
    """Yield the types that a schema names, each maybe several times; nothing below `nested` levels."""
    if not isinstance(schema, Mapping) or not nested:
        return
    named = schema.get("type")
    yield from (each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
    if named is None:
        values = schema.get("enum")
        for value in [*(values if isinstance(values, list) else ()), schema.get("const")]:
            yield from _KINDS.get(type(value), ())
        yield from (kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema)
    for key in ("anyOf", "oneOf", "allOf"):
        combined = schema.get(key)
        for each in combined if isinstance(combined, list) else ():
            yield from _named_types(each, root, nested - 1)
    yield from _named_types(_referred(schema.get("$ref"), root), root, nested - 1)


def _referred(reference: object, root: Mapping[str, Any]) -> object:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
