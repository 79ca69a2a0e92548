"""The kinds of engine arguments: type, range, choices, and the messages for others.

    integer, number   from `least` to `most`, or more than `above`; an integer is a number too, a boolean is neither
    boolean, text     `choices`, where there are any, are the only texts (`any_case`: however they are capitalised)
    list              of what `of` says, not empty
    mapping           its contents are the engine's business
    section           its names are those in `fields`; the engine knows it as the class `class_name`
    anything          the engine's business

`nullable` adds null, `also` adds single values.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

Kind = Literal["integer", "number", "boolean", "text", "list", "mapping", "section", "anything"]
Backend = Literal["pytorch", "_autodeploy"]
BACKENDS: tuple[Backend, ...] = ("pytorch", "_autodeploy")

_NOUNS: dict[Kind, str] = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "text": "a text",
    "list": "a list",
    "mapping": "a mapping",
    "section": "a mapping",
    "anything": "anything",
}
_CHARACTERS_MAX = 64


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One argument of the engine; `pruned` says why a backend does not get it."""

    kind: Kind
    nullable: bool = False
    least: float | None = None
    most: float | None = None
    above: float | None = None
    also: tuple[int | str, ...] = ()
    choices: tuple[int | str, ...] = ()
    any_case: bool = False
    of: "Field | None" = None
    fields: Mapping[str, "Field"] = {}
    class_name: str = ""
    pruned: Mapping[Backend, str] = {}

    def or_null(self) -> Self:
        """Return the same, null being allowed too."""
        return msgspec.structs.replace(self, nullable=True)

    def not_in(self, backend: Backend, why: str) -> Self:
        """Return the same, which that backend does not get."""
        return msgspec.structs.replace(self, pruned={**self.pruned, backend: why})

    @property
    def expected(self) -> str:
        """What is allowed, in words."""
        words = "one of " + ", ".join(map(str, self.choices)) if self.choices else _NOUNS[self.kind] + self._range()
        if self.kind == "list" and self.of:
            words = f"a list, not empty, each {self.of.expected}"
        extra = [*map(str, self.also), *(["null"] if self.nullable else [])]
        return " or ".join([words, *extra])

    def fits(self, value: object) -> bool:
        """Whether the argument may be `value`; of a section: whether it may be one at all."""
        if value is None:
            return self.nullable or self.kind == "anything"
        if any(type(value) is type(other) and value == other for other in self.also):
            return True
        return self._is_of_kind(value) and self._is_chosen(value) and self._is_in_range(value)

    def _range(self) -> str:
        if self.least is not None and self.most is not None:
            return f" from {self.least:g} to {self.most:g}"
        if self.least is not None:
            return f" of {self.least:g} or more"
        if self.above is not None:
            return f" above {self.above:g}" + (f", at most {self.most:g}" if self.most is not None else "")
        return ""

    def _is_of_kind(self, value: object) -> bool:
        match self.kind:
            case "integer":
                return isinstance(value, int) and not isinstance(value, bool)
            case "number":
                return isinstance(value, int | float) and not isinstance(value, bool)
            case "boolean":
                return isinstance(value, bool)
            case "text":
                return isinstance(value, str) and bool(value)
            case "list":
                return isinstance(value, list) and bool(value) and all(not self.of or self.of.fits(x) for x in value)
            case "mapping" | "section":
                return isinstance(value, Mapping)
            case _:
                return True

    def _is_chosen(self, value: object) -> bool:
        if not self.choices or not isinstance(value, int | str):
            return True
        if self.any_case and isinstance(value, str):
            return value.lower() in {str(choice).lower() for choice in self.choices}
        return value in self.choices

    def _is_in_range(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


def integer(least: int | None = None, most: int | None = None, *, also: tuple[int | str, ...] = ()) -> Field:
    """Return a field for integers in that range."""
    return Field(kind="integer", least=least, most=most, also=also)


def number(least: float | None = None, most: float | None = None, *, above: float | None = None) -> Field:
    """Return a field for finite numbers in that range."""
    return Field(kind="number", least=least, most=most, above=above)


def boolean(*, also: tuple[int | str, ...] = ()) -> Field:
    """Return a field for true, false and `also`."""
    return Field(kind="boolean", also=also)


def text(*choices: str, any_case: bool = False) -> Field:
    """Return a field for texts, or for those texts alone."""
    return Field(kind="text", choices=choices, any_case=any_case)


def listing(of: Field) -> Field:
    """Return a field for lists that are not empty."""
    return Field(kind="list", of=of)


def mapping(class_name: str = "") -> Field:
    """Return a field for mappings whose contents are the engine's business."""
    return Field(kind="mapping", class_name=class_name)


def section(class_name: str, **fields: Field) -> Field:
    """Return a field for mappings with those names."""
    return Field(kind="section", class_name=class_name, fields=fields)


def found(value: Any) -> str:  # noqa: ANN401 - whatever was found
    """Return the value and its kind, in words, short enough for one line."""
    match value:
        case None:
            return "null"
        case bool():
            return f"{str(value).lower()} (a boolean)"
        case int():
            return f"{_short(str(value))} (an integer)"
        case float():
            return f"{value} (a number)"
        case str():
            return f"{_short(repr(value))} (a text)"
        case list():
            return f"{_short(repr(value))} (a list)"
        case _:
            return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _short(words: str) -> str:
    return words if len(words) <= _CHARACTERS_MAX else f"{words[:_CHARACTERS_MAX]}..."
