"""The kinds of engine arguments: type, least value, choices, and the messages for others.

    integer           `least` or more, or one of `choices`; a boolean is none
    boolean
    text              not empty; one of `choices`, where there are any
    mapping           its contents are the engine's business
    section           its names are those in `fields`
    anything          the engine's business

`nullable` adds null, `also` adds single values.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

Kind = Literal["integer", "boolean", "text", "mapping", "section", "anything"]
Backend = Literal["pytorch", "_autodeploy"]
BACKENDS: tuple[Backend, ...] = ("pytorch", "_autodeploy")

_NOUNS: dict[Kind, str] = {
    "integer": "an integer",
    "boolean": "a boolean",
    "text": "a text",
    "mapping": "a mapping",
    "section": "a mapping",
    "anything": "anything",
}
_CHARACTERS_MAX = 64


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One argument of the engine; `pruned` has the reason why a backend does not get it."""

    kind: Kind
    nullable: bool = False
    least: int | None = None
    also: tuple[int | str, ...] = ()
    choices: tuple[int | str, ...] = ()
    fields: Mapping[str, "Field"] = {}
    pruned: Mapping[Backend, str] = {}

    def or_null(self) -> Self:
        """Return the same field; null is allowed too."""
        return msgspec.structs.replace(self, nullable=True)

    def not_in(self, backend: Backend, why: str) -> Self:
        """Return the same field; that backend does not get it."""
        return msgspec.structs.replace(self, pruned={**self.pruned, backend: why})

    @property
    def expected(self) -> str:
        """What is allowed, in words."""
        least = "" if self.least is None else f" of {self.least} or more"
        words = "one of " + ", ".join(map(str, self.choices)) if self.choices else _NOUNS[self.kind] + least
        extra = [*map(str, self.also), *(["null"] if self.nullable else [])]
        return " or ".join([words, *extra])

    def fits(self, value: object) -> bool:
        """Whether the argument may be `value`; of a section: whether it may be one at all."""
        if value is None:
            return self.nullable or self.kind == "anything"
        if any(type(value) is type(other) and value == other for other in self.also):
            return True
        return self._is_of_kind(value) and (not self.choices or value in self.choices)

    def _is_of_kind(self, value: object) -> bool:
        match self.kind:
            case "integer":
                is_least = isinstance(value, int) and (self.least is None or value >= self.least)
                return is_least and not isinstance(value, bool)
            case "boolean":
                return isinstance(value, bool)
            case "text":
                return isinstance(value, str) and bool(value)
            case "mapping" | "section":
                return isinstance(value, Mapping)
            case _:
                return True


def integer(least: int, *, also: tuple[int | str, ...] = ()) -> Field:
    """Return a field for integers of `least` or more, and `also`."""
    return Field(kind="integer", least=least, also=also)


def text(*choices: str) -> Field:
    """Return a field for texts, or for those texts alone."""
    return Field(kind="text", choices=choices)


def section(**fields: Field) -> Field:
    """Return a field for mappings with those names."""
    return Field(kind="section", fields=fields)


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
