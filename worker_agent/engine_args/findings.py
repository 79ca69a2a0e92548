"""Findings about engine arguments: an error ends the start, a warning is printed.

Both name the place (a file's line, a flag), the dotted path, what is expected there and what was found. For values that
look like secrets only the kind is shown: values with the name of a secret, and texts with the marks of well-known keys.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from worker_agent.engine_args.layers import Path, dotted

MASK = "**********"
_SECRET_WORDS = {
    "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd",
    "password", "pwd", "secret", "secrets",
}  # fmt: skip
_SECRET_IF_TEXT = {"key", "token"}
"""Words of secret names; `max_tokens` and `mask_token_id` are numbers."""
_SECRET_TEXT = re.compile(r"(hf_|nvapi-|sk-|ghp_|glpat-|AKIA|eyJ)[\w-]{8,}|://[^/\s@]*:[^/\s@]*@|\bBearer\s+\S")
_CHARACTERS_MAX = 64
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")


class ArgumentFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of the arguments. `found` and `expected` are texts without secrets."""

    severity: Literal["error", "warning"]
    place: str
    path: Path = ()
    found: str
    expected: str

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
