"""Reads typed values out of JSON with their paths, and collects all problems.

    path: found what, allowed what

An invalid value is replaced by a valid one, so that values that depend on it can be checked too; it is never used, as
the reader raises in the end. `true` and `false` are no numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

_FOUND_CHARACTERS_MAX = 80


class PoolsConfigInvalid(Exception):
    """The configuration is invalid; `problems` names each value by its path."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(["configuration of pools:", *(f"  {problem}" for problem in problems)]))
        self.problems = problems


class Words(str):
    """A finding in words: it is shown unchanged, without quotes."""

    __slots__ = ()


class ConfigObject:
    """One object of the configuration, its path, and the lists of problems and warnings of all objects."""

    def __init__(self, values: Mapping[str, Any], path: str, problems: list[str], warnings: list[str]) -> None:
        self._values, self._path = values, path
        self.problems, self.warnings = problems, warnings
        self._read: set[str] = set()

    def at(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        """Return whether the key exists, and is not null."""
        return self._values.get(key) is not None

    def problem(self, key: str, found: object, allowed: str) -> None:
        """Report an invalid value."""
        self.problem_at(self.at(key), found, allowed)

    def problem_at(self, path: str, found: object, allowed: str) -> None:
        """Report an invalid value at any path."""
        self.problems.append(f"{path}: found {shown(found)}, allowed {allowed}")

    def value(self, key: str) -> Any:  # noqa: ANN401 - whatever stands there
        """Return the value of the key, None without one; the key counts as read from now on."""
        self._read.add(key)
        return self._values.get(key)

    def renamed(self, key: str, old: str) -> str:
        """Return the name under which `key` is given: its old name is accepted with a warning."""
        if old not in self._values:
            return key
        self._read.add(old)
        self.warnings.append(f"{self.at(old)} is deprecated: use {key}")
        return key if key in self._values else old

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """Return a whole number within bounds, both included."""
        return int(self._number(key, int, least, most, default, f"a whole number, {least}..{most}"))

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """Return a number within bounds, both included."""
        return float(self._number(key, float, least, most, default, f"a number, {least:g}..{most:g}"))

    def _number(self, key: str, kind: Callable[[Any], Any], least: Any, most: Any, default: Any, allowed: str) -> Any:  # noqa: ANN401
        found = self.value(key)
        if found is None and default is not None:
            return default
        if not is_number(found, integer=kind is int) or not least <= found <= most:
            self.problem(key, found, allowed)
            return least if default is None else default
        return kind(found)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean."""
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            self.problem(key, found, "true or false")
            return default
        return found

    def items(self, key: str, allowed: str) -> list[Any]:
        """Return a list; `allowed` describes its items."""
        found = self.value(key)
        if not isinstance(found, list):
            self.problem(key, found, allowed)
            return []
        return found

    def within(self, key: str, *, required: bool = True) -> "ConfigObject | None":
        """Return the object at the key; None if it is missing, or no object."""
        found = self.value(key)
        if found is None and not required:
            return None
        return self.inner(found, self.at(key))

    def inner(self, found: object, path: str) -> "ConfigObject | None":
        """Return the object at `path`; None if it is no object."""
        if not isinstance(found, dict):
            self.problem_at(path, found, "an object")
            return None
        return ConfigObject(found, path, self.problems, self.warnings)

    def unread(self) -> list[str]:
        """Return the keys that were not read."""
        return [key for key in self._values if key not in self._read]

    def refuse_others(self) -> None:
        """Report all keys that were not read as problems."""
        for key in self.unread():
            self.problem(key, self._values[key], f"no other keys than {', '.join(sorted(self._read))}")

    def warn_of_others(self) -> None:
        """Warn of all keys that were not read: they have no effect."""
        self.warnings.extend(f"{self.at(key)} has no effect" for key in self.unread())


def is_number(found: object, *, integer: bool = False) -> bool:
    """Return whether it is a finite number; true and false are not."""
    kinds = int if integer else (int, float)
    return isinstance(found, kinds) and not isinstance(found, bool) and math.isfinite(found)


def shown(found: object) -> str:
    """Return the value as text, shortened if it is long; null is `none`."""
    if found is None:
        return "none"
    if isinstance(found, Words):
        return found
    text = str(found).lower() if isinstance(found, bool) else repr(found)
    return text if len(text) <= _FOUND_CHARACTERS_MAX else f"{text[:_FOUND_CHARACTERS_MAX]}..."
