"""Configuration as text: the effective tree as YAML, and on demand the meaning and range of each setting."""

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kv_runtime.config.options import EXPLAIN

_USER_OF_URL = re.compile(r"://(?:(?!://)\S)+@")
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", SecretStr: "secret"}

_BOUNDS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "min_length": "length at least",
    "max_length": "length at most",
}


def render(settings: BaseModel) -> str:
    """Return the tree as YAML that can be loaded again, except for secrets: they are masked, and a mask is refused.

    Sections and settings that differ from their defaults come first. With `--explain` on the command line, a comment
    above each setting has its meaning and range.
    """
    context = click.get_current_context(silent=True)
    values = _changed_first(settings, type(settings)(), settings.model_dump(mode="json"))
    if context is None or not context.meta.get(EXPLAIN):
        return without_user(yaml.safe_dump(values, sort_keys=False))
    return without_user("".join(_explained(type(settings), values, "")))


def _changed_first(settings: BaseModel, default: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, the dump of `settings`, in the order in which they are shown."""
    names = sorted(values, key=lambda name: bool(getattr(settings, name) == getattr(default, name)))
    sections = {name: section for name in names if isinstance(section := getattr(settings, name), BaseModel)}
    return {
        name: _changed_first(sections[name], getattr(default, name), values[name]) if name in sections else values[name]
        for name in names
    }


def without_user(text: str) -> str:
    """Return the text with the user and the password, or the token, of each URL in it masked.

    All before the last `@` is masked: a password may contain `/` and `@`.
    """
    return _USER_OF_URL.sub("://**********@", text)


def _explained(kind: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        field = kind.model_fields[name]
        if section := section_of(field.annotation):
            yield f"{indent}{name}:\n"
            yield from _explained(section, value, indent + "  ")
            continue
        meaning = f"{field.description}; " if field.description else ""
        yield f"{indent}# {meaning}{allowed_in(field)}\n"
        dumped = yaml.safe_dump({name: value}, sort_keys=False)
        yield "".join(f"{indent}{line}\n" for line in dumped.splitlines())


def section_of(kind: Any) -> type[BaseModel] | None:  # noqa: ANN401 - whatever a field is declared as
    """Return the type of a field if it is the class of a section, else None."""
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def allowed_in(field: FieldInfo) -> str:
    """Return the type and the range of a setting in words."""
    found = {
        name: bound for each in field.metadata for name in _BOUNDS if (bound := getattr(each, name, None)) is not None
    }
    words = [_kind(field.annotation)]
    if "ge" in found and "le" in found:
        words.append(f"{found.pop('ge')}..{found.pop('le')}")
    return ", ".join([*words, *(f"{_BOUNDS[name]} {bound}" for name, bound in found.items())])


def _kind(kind: Any) -> str:  # noqa: ANN401
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(str(each) for each in inner)
    if origin is Annotated:
        return _kind(inner[0])
    if origin in (Union, UnionType):
        words = " or ".join(_kind(each) for each in inner if each is not NoneType)
        return f"{words}, or null" if NoneType in inner else words
    if origin in (tuple, list):
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return f"{_kind(inner[0])} to {_kind(inner[1])}"
    return _WORDS.get(kind, "text")
