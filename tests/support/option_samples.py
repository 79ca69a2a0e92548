"""A value of each option that an agent passes on to its engine."""

from typing import Any

import msgspec
from msgspec import inspect

from kv_protocol.openai.option_table import PASSED, Options
from kv_protocol.openai.requests import MARKS


def _sample(kind: inspect.Type) -> Any:
    """Return a value of the type that is no default of any engine."""
    if isinstance(kind, inspect.UnionType):
        return _sample(kind.types[0])
    if isinstance(kind, inspect.IntType):
        return (kind.ge or 0) + 3
    assert isinstance(kind, inspect.FloatType), f"no sample of {kind}: add one here"
    return (kind.ge or 0.0) + 0.25


_KINDS = {field.name: field.type for field in msgspec.structs.fields(Options)}
PASSED_ON: dict[str, Any] = {
    name: _sample(inspect.type_info(_KINDS[name])) for name, marks in MARKS.items() if PASSED in marks
}
