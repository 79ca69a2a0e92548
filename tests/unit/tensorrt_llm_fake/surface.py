"""A class or function of a package as one line, and the lines that `SURFACE.md` of the fake has of them.

model       a pydantic model's fields: `name=default`, `name` alone where one is required
dataclass   the fields that its constructor takes, likewise
map         a typed dictionary's keys
enum        `MEMBER=value`
exception   its first base
callable    a function's, or a class's constructor's, parameters: `name=default`, `*` and `**` as they are
"""

import dataclasses
import enum
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, is_typeddict

from pydantic import BaseModel

PAGE = Path("tests/support/tensorrt_llm_fake/SURFACE.md")
REQUIRED = ""


class Row(NamedTuple):
    """What the page says of one name below `tensorrt_llm`."""

    name: str
    kind: str
    line: str
    source: str


def rows() -> list[Row]:
    """Return the rows of the page's table of names."""
    return [Row(*cells) for cells in table("Names, signatures, fields")]


def table(heading: str) -> list[list[str]]:
    """Return the body cells of the first table below a heading, without backquotes."""
    below = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")][2:]
    return [
        [cell.strip().strip("`").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]


def found(name: str) -> Any:
    """Return what a dotted name below `tensorrt_llm` stands for: the longest module, then attributes."""
    parts = name.split(".")
    for split in range(len(parts), -1, -1):
        try:
            thing: Any = import_module(".".join(["tensorrt_llm", *parts[:split]]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def members(thing: Any) -> dict[str, str]:
    """Return the default of each field or parameter."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return {each.name: str(each.value) for each in thing}
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return {thing.__mro__[1].__name__: REQUIRED}
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return {name: _default(info) for name, info in thing.model_fields.items()}
    if is_typeddict(thing):
        return dict.fromkeys(thing.__annotations__, REQUIRED)
    if dataclasses.is_dataclass(thing) and isinstance(thing, type):
        return {each.name: _default(each) for each in dataclasses.fields(thing) if each.init}
    return dict(_parameter(each) for each in inspect.signature(thing).parameters.values() if each.name != "self")


def line(thing: Any) -> str:
    """Return a thing's line, as the page has it."""
    return ", ".join(name if default == REQUIRED else f"{name}={default}" for name, default in members(thing).items())


def parts(told: str) -> list[str]:
    """Return the members of a line: commas inside brackets and quotes separate none."""
    found, depth, quoted = [""], 0, False
    for character in told:
        quoted ^= character == "'"
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0 and not quoted:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found]


def kind(thing: Any) -> str:
    """Return which of the kinds above a thing is."""
    if not isinstance(thing, type):
        return "callable"
    if is_typeddict(thing):
        return "map"
    for name, base in (("enum", enum.Enum), ("exception", BaseException), ("model", BaseModel)):
        if issubclass(thing, base):
            return name
    return "dataclass" if dataclasses.is_dataclass(thing) else "callable"


def _parameter(parameter: inspect.Parameter) -> tuple[str, str]:
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    return stars + parameter.name, REQUIRED if parameter.default is parameter.empty else _shown(parameter.default)


def _default(field: Any) -> str:
    if getattr(field, "default_factory", None) not in {None, dataclasses.MISSING}:
        return "<factory>"
    value = field.default
    is_required = value is dataclasses.MISSING or type(value).__name__ == "PydanticUndefinedType"
    return REQUIRED if is_required else _shown(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
