"""A worker's endpoint name, `namespace.component.endpoint`: it separates the pools of one fleet.

    role                  default
    aggregated, decode    dynamo.backend.generate
    prefill               dynamo.prefill.generate
    encode                dynamo.encode.generate

`dyn://` before a name is dropped. There are exactly three parts, each of letters, digits, `_` and `-`, at most 64.
Source: `docs/SOURCES.md` D6.1 (three parts, `dyn://`, defaults); characters and lengths are ours.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from kv_protocol.errors import LimitExceeded
from kv_protocol.fleet import Role

_SCHEME = "dyn://"
_PART = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ALLOWED = "namespace.component.endpoint, each 1..64 letters, digits, `_` or `-`"
_COMPONENTS: Mapping[Role, str] = {
    "aggregated": "backend",
    "prefill": "prefill",
    "decode": "backend",
    "encode": "encode",
}


class EndpointName(NamedTuple):
    """The three parts; joined by dots as text."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return ".".join(self)


def endpoint_name(text: str) -> EndpointName:
    """Parse a name, with or without `dyn://`; raise `LimitExceeded` for anything else."""
    parts = text.removeprefix(_SCHEME).split(".")
    if len(parts) != len(EndpointName._fields) or not all(map(_PART.fullmatch, parts)):
        raise LimitExceeded("endpoint", text, _ALLOWED)
    return EndpointName(*parts)


def default_endpoint(role: Role) -> EndpointName:
    """Return the default name of a worker of this role."""
    return EndpointName("dynamo", _COMPONENTS[role], "generate")
