"""Layers of engine arguments, merged so that each value keeps the layer it is from, and what is found wrong in them.

A layer is a table of values by path. A mapping with only texts as keys is a section, whose values have paths of their
own; anything else (a number, a list, null, an empty section, any other mapping) is a value, which is kept or replaced
as a whole. A value of a higher layer replaces the lower ones at its path, above it and below it; an empty section
replaces no section.

A finding is an error, which ends the start, or a warning, which is printed. It names the place (a file's line, a flag),
the dotted path, what is expected there and what was found. `MASK` is shown for what looks like a secret: a value whose
name is a secret's, and a text with the marks of well-known keys.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import msgspec

LayerName = Literal["default", "flag", "file", "override", "forced"]
"""From the lowest to the highest; a higher layer replaces values of a lower one."""
Path = tuple[str, ...]

MASK = "**********"
_SECRET_WORDS = {
    "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd",
    "password", "pwd", "secret", "secrets",
}  # fmt: skip
_SECRET_IF_TEXT = {"key", "token"}
"""Words that name a secret only if the value is a text: a number, such as `mask_token_id` has, is no secret."""
_SECRET_TEXT = re.compile(r"(hf_|nvapi-|sk-|ghp_|glpat-|AKIA|eyJ)[\w-]{8,}|://[^/\s@]*:[^/\s@]*@|\bBearer\s+\S")
_CHARACTERS_MAX = 64
_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list"}
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")


class EffectiveValue(NamedTuple):
    """A value, its layer, and the place in it: a file's line, a flag, the reason for a forced value.

    An empty section is a value, too.
    """

    path: Path
    value: Any
    layer: LayerName
    place: str

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)

    @property
    def origin(self) -> str:
        """The layer and the place, as they are printed."""
        return self.layer if self.layer == self.place else f"{self.layer} ({self.place})"

    @property
    def shown(self) -> Any:  # noqa: ANN401 - whatever the argument is
        """The value for printing, without secrets."""
        return shown(self.path, self.value)


Values = dict[Path, EffectiveValue]
Replacement = tuple[EffectiveValue, EffectiveValue]
"""The value of a layer, and the value of a higher layer that replaced it."""


def dotted(path: Path) -> str:
    """Return the path as it is written: `a.b.c`; an empty name, or one with a dot, is quoted."""
    return ".".join(json.dumps(name) if "." in name or not name else name for name in path)


def layer(name: LayerName, entries: Iterable[tuple[Path, Any, str]]) -> Values:
    """Return the layer of these paths, values and places; sections become values with paths of their own."""
    values: Values = {}
    for path, value, place in entries:
        is_section = isinstance(value, Mapping) and value and all(isinstance(inner, str) for inner in value)
        if path and not is_section:
            values[path] = EffectiveValue(path, value, name, place)
        else:
            values |= layer(name, [((*path, inner), each, place) for inner, each in value.items()])
    return values


def merge(lower: Values, upper: Values) -> tuple[Values, list[Replacement]]:
    """Return the values of both layers, and which of them were replaced; neither argument is changed."""
    whole, replaced = dict(lower), list[Replacement]()
    for path, new in upper.items():
        below = [each for each in lower if each[: len(path)] == path and each != path]
        if below and new.value == {}:
            continue
        for each in [*below, *(path[:size] for size in range(1, len(path) + 1))]:
            old = whole.pop(each, None)
            is_filled = len(each) < len(path) and old is not None and old.value == {}
            is_same = old is not None and each == path and (type(old.value), old.value) == (type(new.value), new.value)
            if old is not None and not is_filled and not is_same:
                replaced.append((old, new))
        whole[path] = new
    return whole, replaced


def at(values: Values, *path: str) -> Any:  # noqa: ANN401 - whatever the argument is
    """Return a copy of the value at `path`, a section as a mapping; None if no layer has one, or it is null."""
    if path in values:
        return deepcopy(values[path].value)
    return (
        nested({each[len(path) :]: value.value for each, value in values.items() if each[: len(path)] == path}) or None
    )


def first_at(values: Values, path: Path) -> EffectiveValue | None:
    """Return the value at `path`, or a section's first value; None without a value."""
    return next((value for each, value in values.items() if each[: len(path)] == path), None)


def nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the values as nested mappings, as YAML and JSON have them; they are copies."""
    whole: dict[str, Any] = {}
    for path, value in values.items():
        inner = whole
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = deepcopy(value)
    return whole


# ---------------------------------------------------------------- findings
Severity = Literal["error", "warning"]


class ArgumentFinding(msgspec.Struct, frozen=True):
    """One problem of the arguments. `found` and `expected` are texts without secrets."""

    place: str
    found: str
    expected: str
    path: Path = ()
    severity: Severity = "error"

    def __str__(self) -> str:
        where = f"{self.place}: {dotted(self.path)}" if self.path else self.place
        return f"{where}: expected {self.expected}, found {self.found}"


class EngineArgsInvalid(Exception):
    """The engine arguments are invalid; `findings` are all errors."""

    def __init__(self, findings: Sequence[ArgumentFinding]) -> None:
        super().__init__("\n".join(["engine arguments:", *(f"  {finding}" for finding in findings)]))
        self.findings = tuple(findings)


def shown(path: Path, value: Any) -> Any:  # noqa: ANN401 - whatever YAML and JSON can say
    """Return the value for printing: anything that looks like a secret, at any depth, is `MASK`."""
    if isinstance(value, Mapping):
        return {name: shown((*path, str(name)), inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shown(path, inner) for inner in value]
    return MASK if _is_secret(path, value) else value


def _is_secret(path: Path, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return False
    named = [{word.lower() for word in _WORDS.findall(name)} for name in path]
    if any(words & _SECRET_WORDS for words in named):
        return True
    if not isinstance(value, str):
        return False
    return bool(named and named[-1] & _SECRET_IF_TEXT) or bool(_SECRET_TEXT.search(value))


def found(value: Any) -> str:  # noqa: ANN401 - whatever was found
    """Return the value and its kind, in words, short enough for one line."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a mapping"
    if (kind := _KINDS.get(type(value))) is None:
        return f"a {type(value).__name__}"
    words = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{words if len(words) <= _CHARACTERS_MAX else words[:_CHARACTERS_MAX] + '...'} ({kind})"
