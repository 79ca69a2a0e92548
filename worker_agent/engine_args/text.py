"""Engine arguments as text: YAML with line numbers, JSON, and `--trtllm.a.b.c value` flags.

All errors of flags are reported together, of a file or JSON the first, each with its place.

A flag's value is null (`none`, `null`), a boolean, an integer, a number, else a text. If `fields.py` has a text, it
is a text, so that `--trtllm.revision 12` needs no quotes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

import msgspec
import yaml

from kv_protocol.errors import UNDECODABLE
from worker_agent.engine_args.fields import TEXTS
from worker_agent.engine_args.findings import ArgumentFinding, EngineArgsInvalid, found
from worker_agent.engine_args.layers import LayerName, Path, Values, layer

FLAG_PREFIX = "--trtllm."

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MERGE = "tag:yaml.org,2002:merge"
_KINDS = ("null", "bool", "int", "float", "seq", "map", "str")
_NULLS, _BOOLEANS = {"none", "null"}, {"true": True, "false": False}


def read_file(file: File, name: LayerName) -> Values:
    """Return the layer of a YAML file; an empty file is an empty layer.

    Raises:
        EngineArgsInvalid: the file cannot be read.
    """
    try:
        loader = _Loader(file.read_bytes().decode())
        root = loader.get_single_node()
        lines = _lines(root)
        values = None if root is None else loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _invalid(str(file), why, "a readable file in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = str(file) if mark is None else f"{file}:{mark.line + 1}"
        raise _invalid(place, error.problem or "something else", "YAML") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _invalid(str(file), str(error).partition("\n")[0], "YAML") from error
    return _named(name, values or {}, str(file), {path: f"{file}:{line}" for path, line in lines.items()})


def read_json(text: str, place: str, name: LayerName) -> Values:
    """Return a JSON object's values as a layer of engine arguments.

    Raises:
        EngineArgsInvalid: the text is not a JSON object.
    """
    try:
        return _named(name, msgspec.json.decode(text), place, {})
    except UNDECODABLE as error:
        raise _invalid(place, str(error), "JSON") from error


def _named(name: LayerName, values: object, place: str, places: Mapping[Path, str]) -> Values:
    """Return the layer of the values; a value without a place has that of the section above it."""
    if not isinstance(values, dict) or not all(isinstance(each, str) for each in values):
        raise _invalid(place, found(values), "a mapping, whose names are texts")
    whole = layer(name, [((), values, place)])
    for path in whole:
        named = [places[path[:size]] for size in range(1, len(path) + 1) if path[:size] in places]
        whole |= layer(name, [(path, whole[path].value, named[-1])]) if named else {}
    return whole


def read_flags(arguments: Sequence[str], name: LayerName) -> Values:
    """Return the layer of flags `--trtllm.a.b.c value` or `--trtllm.a.b.c=value`.

    Raises:
        EngineArgsInvalid: with every argument that is not such a flag, lacks its value, or contradicts an earlier one.
    """
    values: Values = {}
    problems: list[ArgumentFinding] = []
    for flag, text in _pairs(arguments, problems):
        path = tuple(flag.removeprefix(FLAG_PREFIX).split("."))
        one = layer(name, [(path, typed(text, path), flag)])
        if not all(map(_NAME.fullmatch, path)):
            problems.append(_problem(flag, "no such path", f"{FLAG_PREFIX}a.b.c, of letters, digits and _"))
        elif any(path[: len(each)] == each[: len(path)] for each in values):
            problems.append(_problem(flag, "an earlier flag for the same path, or one above it", "one flag for a path"))
        values |= one
    if problems:
        raise EngineArgsInvalid(problems)
    return values


def typed(text: str, path: Path) -> Any:  # noqa: ANN401 - one of the types above
    """Return the value of a flag's text at `path`."""
    small = text.lower()
    if small in _NULLS:
        return None
    if path in TEXTS:
        return text
    if small in _BOOLEANS:
        return _BOOLEANS[small]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


class _Loader(yaml.SafeLoader):
    """Constructs texts, numbers, booleans, null, lists and mappings alone."""


_Loader.yaml_constructors = {
    tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag[18:] in _KINDS
}


def _lines(node: yaml.Node | None, above: Path = ()) -> dict[Path, int]:
    """Return the line of every name in the document; raise `MarkedYAMLError` where one is twice in a mapping."""
    lines: dict[Path, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path = (*above, str(key.value))
        if path in lines and key.tag != _MERGE:
            raise yaml.MarkedYAMLError(problem=f"{key.value!r} twice", problem_mark=key.start_mark)
        lines |= {path: key.start_mark.line + 1, **_lines(value, path)}
    return lines


def _pairs(arguments: Sequence[str], problems: list[ArgumentFinding]) -> Iterator[tuple[str, str]]:
    rest = iter(arguments)
    for argument in rest:
        flag, has_value, text = argument.partition("=")
        if not flag.startswith(FLAG_PREFIX):
            found = "no option of this command" if flag.startswith("-") else "a value that belongs to no option"
            place = flag if flag.startswith("-") else "arguments"
            problems.append(_problem(place, found, f"this command's options, or {FLAG_PREFIX}a.b.c VALUE"))
        elif has_value:
            yield flag, text
        else:
            value = next(rest, None)
            if value is None or value.startswith("--"):
                problems.append(_problem(flag, "nothing", "a value behind it"))
            else:
                yield flag, value


def _problem(place: str, what: str, expected: str) -> ArgumentFinding:
    return ArgumentFinding(severity="error", place=place, found=what, expected=expected)


def _invalid(place: str, what: str, expected: str) -> EngineArgsInvalid:
    return EngineArgsInvalid([_problem(place, what, expected)])
