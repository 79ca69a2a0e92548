r"""Errors of request bodies for clients: the path, what was found, what is allowed.

The found value is shown as JSON, as the client wrote it, cut to `FOUND_CHARACTERS_MAX` characters; so is an unknown
key. Types are described in JSON terms; a type is inspected when its first error is explained.

Decoders refuse half a character (`\ud83d` without the `\ude00` that completes it) as JSON that is cut off or malformed;
our error names the escape. Source: RFC 8259, section 8.2.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect as types

from kv_protocol.errors import FOUND_CHARACTERS_MAX, UNDECODABLE, LimitExceeded, shortened

ALLOWED = "the parameters of the OpenAI interface and no others"
"""What an agent allows if it found an unknown key."""
_ALLOWED_CHARACTERS_MAX = 200
_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_OF_TYPE = re.compile(r"Expected `|Invalid (?:enum )?value |Invalid base64|Number out of range")
"""How msgspec's message begins if a value has the wrong type or is out of range."""
_ANY_KEY = "[...]"
"""What msgspec writes in place of an object's free key."""
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.|key)\]")
_NOUNS: dict[type[types.Type], tuple[str, str]] = {
    types.BoolType: ("true or false", "true or false"),
    types.IntType: ("a whole number", "whole numbers"),
    types.FloatType: ("a number", "numbers"),
    types.StrType: ("a string", "strings"),
    types.BytesType: ("base64", "base64"),
    types.DictType: ("an object", "objects"),
    types.StructType: ("an object", "objects"),
}
_ROUTERS_OWN = frozenset({"kv_continue", "kv_prompt_ids", "prompt_token_ids"})
"""Keys that agents accept from the router only."""


class Verbatim(str):
    """Text that a message shows unquoted: it is JSON already, or describes what was found."""

    __slots__ = ()


class RequestInvalid(LimitExceeded):
    """An invalid request body; `field` is the path, as clients write it."""

    @staticmethod
    def shown(found: object) -> str:
        """Return `found` as JSON."""
        return as_json(found)


class BodyTooLarge(RequestInvalid):
    """A request body with too many bytes or values."""


def as_json(found: object, characters_max: int = FOUND_CHARACTERS_MAX) -> str:
    """Return `found` as JSON, cut with `...` if it is long."""
    if isinstance(found, Verbatim):
        return shortened(found, characters_max)
    try:
        text = json.dumps(found, ensure_ascii=False, default=str)
    except TypeError:  # a key that is no text: YAML has dates
        found = text = str(found)
    return shortened(text if text.isprintable() else json.dumps(found, default=str), characters_max)


def explained(
    error: Exception,
    body: bytes | bytearray | msgspec.Raw,
    kind: Any,  # noqa: ANN401 - a type as msgspec takes it
    root: str = "",
) -> RequestInvalid:
    """Explain msgspec's error in `body`, which the client knows as `root` (empty: the whole body).

    `kind` is the type that `body` was decoded as; it has the allowed values.
    """
    if not isinstance(error, msgspec.ValidationError):
        if half := lone_surrogate(memoryview(body)):
            return RequestInvalid(root or "body", Verbatim(half), "UTF-16 surrogates in pairs")
        return RequestInvalid(root or "body", _begun(body), f"JSON ({error})")
    text = str(error)
    where = _PATH.search(text)
    path = where["path"] if where else ""
    if unknown := _UNKNOWN.search(text):
        return RequestInvalid(_joined(root, path, shortened(unknown["field"])), unknown["field"], ALLOWED)
    if missing := _MISSING.search(text):
        return RequestInvalid(_joined(root, path, missing["field"]), None, "a value: it is required")
    allowed = _PATH.sub("", text)
    if path in _ROUTERS_OWN and allowed.startswith("Expected `null`"):
        allowed = "none: the router sets it"
    elif _OF_TYPE.match(text):
        allowed = _allowed(kind, path, is_key=where is not None and where["key"] is not None)
    field = _joined(root, path.removesuffix(_ANY_KEY)) or "body"
    return RequestInvalid(field, _found(body, path), shortened(allowed, _ALLOWED_CHARACTERS_MAX))


def _allowed(kind: Any, path: str, *, is_key: bool) -> str:  # noqa: ANN401 - a type as msgspec takes it
    if is_key:
        return f"keys: {allowed_at(kind, f'{path}[key]')}"
    return f"values: {allowed_at(kind, path)}" if path.endswith(_ANY_KEY) else allowed_at(kind, path)


def _joined(*parts: str) -> str:
    """Join the non-empty parts of a path; an index follows without a dot."""
    return ".".join(part for part in parts if part).replace(".[", "[")


def _found(body: bytes | bytearray | msgspec.Raw, path: str) -> Verbatim:
    """Return the value at `path`, as the client wrote it; only the values on the path are decoded."""
    value: bytes | bytearray | msgspec.Raw = body
    try:
        for key in re.findall(r"[^.\[\]]+", path):
            if key.isdecimal() and bytes(memoryview(value)[:1]) == b"[":
                value = msgspec.json.decode(value, type=list[msgspec.Raw])[int(key)]
            else:
                value = msgspec.json.decode(value, type=dict[str, msgspec.Raw])[key]
    except (*UNDECODABLE, LookupError):
        pass  # msgspec does not name the keys of objects: the enclosing value is shown
    return Verbatim(_begun(value))


def _begun(value: bytes | bytearray | msgspec.Raw) -> str:
    """Return the beginning of a value, with one character more than is shown, so that `shortened` marks the cut."""
    begun = bytes(memoryview(value)[: 4 * (FOUND_CHARACTERS_MAX + 1)]).decode("utf-8", "replace")
    return begun[: FOUND_CHARACTERS_MAX + 1]


_HALF = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+"
    rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)


def lone_surrogate(text: bytes | bytearray | memoryview) -> str:
    """Return the first lone surrogate and its place; empty: there is none, or an escape before it is malformed."""
    half = _HALF.match(text)
    return f"{half[1].decode()} at byte {half.start(1)}" if half else ""


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
    """Yield the types of a value's field `key`, or of its items; of its keys if `index` is "key"."""
    if isinstance(kind, types.StructType) and key:
        if kind.tag_field == key:
            yield types.LiteralType((kind.tag,))
        yield from (field.type for field in kind.fields if field.encode_name == key)
    elif isinstance(kind, types.ListType) and index:
        yield kind.item_type
    elif isinstance(kind, types.DictType):
        yield kind.key_type if index == "key" else kind.value_type


def _words(kind: types.Type, *, are_many: bool = False) -> str:
    """Describe the allowed values other than null; `are_many`: in the plural, as items of a list."""
    words: list[str] = []
    for each in _members(kind):
        if isinstance(each, types.LiteralType):
            words += map(json.dumps, each.values)
        elif isinstance(each, types.ListType):
            items, length = _words(each.item_type, are_many=True), _span(each.min_length, each.max_length, "items")
            words.append(", ".join(filter(None, (f"a list of {items}", length))))
        elif not isinstance(each, types.NoneType):
            noun, bounds = _NOUNS.get(type(each), ("any value", "any values"))[are_many], _range(each)
            words.append(f"{noun} ({bounds})" if are_many and bounds else ", ".join(filter(None, (noun, bounds))))
    return " or ".join(dict.fromkeys(words)) or "null"


def _range(kind: types.Type) -> str:
    if isinstance(kind, types.IntType | types.FloatType):
        return _span(kind.ge, kind.le, "") if kind.gt is None else f"more than {_number(kind.gt)}"
    if isinstance(kind, types.StrType):
        return f"as {kind.pattern}" if kind.pattern else _span(kind.min_length, kind.max_length, "characters")
    if isinstance(kind, types.DictType):
        return _span(kind.min_length, kind.max_length, "keys")
    return ""


def _span(low: float | None, high: float | None, unit: str) -> str:
    if low is None:
        return "" if high is None else f"up to {_number(high)} {unit}".rstrip()
    span = f"{_number(low)} or more" if high is None else f"{_number(low)}..{_number(high)}"
    return f"{span} {unit}".rstrip()


def _number(value: float) -> str:
    return str(value).removesuffix(".0")
