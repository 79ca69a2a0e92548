"""What is wrong with a request body, said as its client would look for it: the path, what was found, what may be."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")
_FOUND_CHARACTERS_MAX = 80
_ROUTERS_OWN = frozenset({"kv_continue", "kv_prompt_ids", "prompt_token_ids"})
"""Keys that agents may take from the router, and nobody else."""


class RequestInvalid(LimitExceeded):
    """A request body that may not be as it is; `field` is its path, as clients write it."""


def explained(error: Exception, body: bytes | msgspec.Raw, root: str = "") -> RequestInvalid:
    """Return what msgspec found wrong in `body`, which the client knows as `root` (empty: the whole of it)."""
    body = bytes(body)
    if not isinstance(error, msgspec.ValidationError):
        found = body[:_FOUND_CHARACTERS_MAX].decode("utf-8", "replace")
        return RequestInvalid(root or "body", found, f"JSON ({error})")
    text = str(error)
    where = _PATH.search(text)
    path = where["path"] if where else ""
    allowed = _PATH.sub("", text).removeprefix("Expected ")
    if unknown := _UNKNOWN.search(text):
        allowed = "the parameters of the OpenAI interface and no others"
        return RequestInvalid(_joined(root, path, unknown["field"]), unknown["field"], allowed)
    if missing := _MISSING.search(text):
        return RequestInvalid(_joined(root, path, missing["field"]), None, "a value: it is required")
    if path in _ROUTERS_OWN and allowed.startswith("`null`"):
        allowed = "none: the router sets it"
    return RequestInvalid(_joined(root, path) or "body", _found(body, path), allowed)


def shortened(found: object) -> object:
    """Return what is shown of a value that a client sent: itself, or the beginning of what is long."""
    told = repr(found)
    return found if len(told) <= _FOUND_CHARACTERS_MAX else f"{told[:_FOUND_CHARACTERS_MAX]}..."


def _joined(*parts: str) -> str:
    """Return a path of those parts that are not empty; an index follows without a dot."""
    return ".".join(part for part in parts if part).replace(".[", "[")


def _found(body: bytes, path: str) -> Any:  # noqa: ANN401 - whatever the client sent there
    try:
        value: Any = msgspec.json.decode(body)
    except UNDECODABLE:
        return "what cannot be read"
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
    return shortened(value)
