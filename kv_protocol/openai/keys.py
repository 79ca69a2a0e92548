"""Keys of a request body that an endpoint does not have, though `Inbound` can read them."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kv_protocol.openai.errors import RequestInvalid
from kv_protocol.openai.inbound import Inbound

ALLOWED = "the parameters of the OpenAI interface and no others"
_DEFAULTS: dict[str, Any] = dict(zip(Inbound.__struct_fields__, Inbound.__struct_defaults__, strict=True))


def refusing(names: frozenset[str]) -> Callable[[Inbound], None]:
    """Return a check that raises `RequestInvalid` for a body that has one of these keys."""
    keys = sorted(names)
    read = attrgetter(*keys)
    absent = tuple(_DEFAULTS[key] for key in keys)

    def check(inbound: Inbound) -> None:
        found = read(inbound)
        if found != absent:
            key = next(key for key, value, default in zip(keys, found, absent, strict=True) if value != default)
            raise RequestInvalid(key, key, ALLOWED)

    return check
