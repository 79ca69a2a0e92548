"""A class or function of a package as one line, and the lines that `SURFACE.md` of the fake has of them.

    model       a pydantic model's fields: `name: type = default`
    dataclass   the fields that its constructor takes, likewise
    map         a typed dictionary's keys: `name: type`
    enum        `MEMBER=value`
    exception   its first base
    callable    a function's, or a class's constructor's, parameters: `name=default`, `*` and `**` as they are

Types are shown, and compared with the fake's alone; names, order and defaults with the real package's, too.
"""

import dataclasses
import enum
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, is_typeddict

from pydantic import BaseModel

PAGE = Path("tests/support/tensorrt_llm_fake/SURFACE.md")
REQUIRED = "(required)"


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


def members(thing: Any) -> list[tuple[str, str, str]]:
    """Return name, type and default of each field or parameter."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return [(each.name, "", str(each.value)) for each in thing]
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return [(thing.__mro__[1].__name__, "", "")]
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return [(name, _type(info.annotation), _default(info)) for name, info in thing.model_fields.items()]
    if is_typeddict(thing):
        return [(name, _type(annotation), REQUIRED) for name, annotation in thing.__annotations__.items()]
    if dataclasses.is_dataclass(thing) and isinstance(thing, type):
        return [(each.name, _type(each.type), _default(each)) for each in dataclasses.fields(thing) if each.init]
    return [_parameter(each) for each in inspect.signature(thing).parameters.values() if each.name != "self"]


def line(thing: Any) -> str:
    """Return a thing's line, as the page has it."""
    return ", ".join(_joined(*member) for member in members(thing))


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


def _joined(name: str, annotation: str, default: str) -> str:
    typed = f"{name}: {annotation}" if annotation else name
    if default in {"", REQUIRED}:
        return typed
    return f"{typed} = {default}" if annotation else f"{typed}={default}"


def _parameter(parameter: inspect.Parameter) -> tuple[str, str, str]:
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    default = REQUIRED if parameter.default is parameter.empty else _shown(parameter.default)
    return (stars + parameter.name, "", default)


def _default(field: Any) -> str:
    if getattr(field, "default_factory", None) not in {None, dataclasses.MISSING}:
        return "<factory>"
    value = field.default
    is_required = value is dataclasses.MISSING or type(value).__name__ == "PydanticUndefinedType"
    return REQUIRED if is_required else _shown(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "None"
    if origin is Annotated:
        return _type(arguments[0])
    if origin in {Union, UnionType}:
        return " | ".join(_type(each) for each in arguments)
    if origin is Literal:
        return " | ".join(repr(each) for each in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type(each) for each in arguments)}]"
    return str(getattr(annotation, "__name__", annotation))
