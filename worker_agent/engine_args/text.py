"""Engine arguments as text: YAML with line numbers, JSON, and `--trtllm.a.b.c value` flags.

All errors are reported together, each with its place. Only texts, numbers, booleans, null, lists and mappings are
constructed; a name occurs once in a mapping; a file has at most `BYTES_MAX` bytes, `VALUES_MAX` values (an alias counts
at each use) and `DEPTH_MAX` levels.

A flag's value is null (`none`, `null`), a boolean, an integer, a number, else a text. If `fields` requires a text, it
is a text, so that `--trtllm.revision 12` needs no quotes.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path as File
from typing import Any

import yaml

from worker_agent.engine_args.fields import field_at
from worker_agent.engine_args.findings import ArgumentFinding, EngineArgsInvalid
from worker_agent.engine_args.layers import Layer, LayerName, Path

BYTES_MAX = 1 << 20
VALUES_MAX = 20_000
DEPTH_MAX = 32
FLAG_PREFIX = "--trtllm."

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MERGE = "tag:yaml.org,2002:merge"
_NULLS, _BOOLEANS = {"none", "null"}, {"true": True, "false": False}
_TOO_MUCH = f"at most {VALUES_MAX} values, {DEPTH_MAX} deep"


def read_file(file: File, name: LayerName) -> Layer:
    """Return the layer of a YAML file; an empty file is an empty layer.

    Raises:
        EngineArgsInvalid: the file cannot be read; or with all of its errors.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(BYTES_MAX + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _invalid(str(file), why, "a readable file in UTF-8") from error
    if len(raw) > BYTES_MAX:
        raise _invalid(str(file), "a larger file", f"at most {BYTES_MAX} bytes")
    return _Yaml(str(file)).layer(text, name)


def read_json(text: str, place: str, name: LayerName) -> Layer:
    """Return a JSON object's values as a layer of engine arguments.

    Raises:
        EngineArgsInvalid: the text is not a JSON object, or has a name twice.
    """
    try:
        values = json.loads(text, object_pairs_hook=_named_once, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _invalid(f"{place}: line {error.lineno}, column {error.colno}", error.msg, "JSON") from error
    except RecursionError as error:
        raise _invalid(place, "more", _TOO_MUCH) from error
    except ValueError as error:
        raise _invalid(place, str(error), "JSON") from error
    if not isinstance(values, dict):
        raise _invalid(place, f"a {type(values).__name__}", "a JSON object")
    return Layer(name=name, values=values, place=place)


def read_flags(arguments: Sequence[str], name: LayerName) -> Layer:
    """Return the layer of flags `--trtllm.a.b.c value` or `--trtllm.a.b.c=value`.

    Raises:
        EngineArgsInvalid: with every argument that is not such a flag, lacks its value, or contradicts an earlier one.
    """
    values: dict[str, Any] = {}
    places: dict[Path, str] = {}
    problems: list[ArgumentFinding] = []
    for flag, text in _pairs(arguments, problems):
        path = tuple(flag.removeprefix(FLAG_PREFIX).split("."))
        if not all(map(_NAME.fullmatch, path)) or len(path) > DEPTH_MAX:
            problems.append(_problem(flag, "no such path", f"{FLAG_PREFIX}a.b.c, of letters, digits and _"))
        elif not _put(values, path, typed(text, path)):
            problems.append(_problem(flag, "an earlier flag for the same path, or one above it", "one flag for a path"))
        else:
            places[path] = flag
    if problems:
        raise EngineArgsInvalid(problems)
    return Layer(name=name, values=values, place=f"{FLAG_PREFIX}*", places=places)


def typed(text: str, path: Path) -> Any:  # noqa: ANN401 - one of the types above
    """Return the value of a flag's text at `path`."""
    field, small = field_at(path), text.lower()
    if small in _NULLS and "null" not in (field.choices if field else ()):
        return None
    if field is not None and field.kind == "text":
        return text
    if small in _BOOLEANS:
        return _BOOLEANS[small]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


class _Yaml:
    """One document, read as nodes: nodes have line numbers, and aliases are counted before they are followed."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._places: dict[Path, str] = {}
        self._problems: list[ArgumentFinding] = []
        self._values = 0
        self._loader = yaml.SafeLoader("")

    def layer(self, text: str, name: LayerName) -> Layer:
        """Return the document's values."""
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            values = {} if root is None or root.tag.endswith(":null") else self._value(root, (), 0)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise _invalid(self._at(mark), error.problem or "something else", "YAML") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise _invalid(self._file, str(error).partition("\n")[0], "YAML") from error
        if not isinstance(values, dict):
            self._problems.append(
                _problem(self._at(root.start_mark if root else None), "something else", "a mapping of arguments")
            )
        elif not all(isinstance(key, str) for key in values):
            self._problems.append(_problem(self._file, "a name that is no text", "arguments' names"))
        if self._problems:
            raise EngineArgsInvalid(self._problems)
        return Layer(name=name, values=values, place=self._file, places=self._places)

    def _value(self, node: yaml.Node, path: Path, depth: int) -> Any:  # noqa: ANN401
        self._values += 1
        if depth > DEPTH_MAX or self._values > VALUES_MAX:
            raise _invalid(self._at(node.start_mark), "more", _TOO_MUCH)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(inner, path, depth + 1) for inner in node.value]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[Any, Any]:
        """Names beside a merge key override its mappings; of several mappings an earlier one overrides a later one."""
        values: dict[Any, Any] = {}
        for merged in reversed([other for key, other in node.value if key.tag == _MERGE]):
            for one in reversed(merged.value if isinstance(merged, yaml.SequenceNode) else [merged]):
                inner = self._value(one, path, depth + 1)
                values |= inner if isinstance(inner, dict) else {}
        own: set[Any] = set()
        for key, inner in node.value:
            if key.tag == _MERGE:
                continue
            name = self._scalar(key, path)
            if not isinstance(name, str | int) or name in own:
                found = f"{name!r} twice" if name in own else "something that is no text"
                self._problems.append(_problem(self._at(key.start_mark), found, "a name, once", path))
                continue
            own.add(name)
            self._places[*path, str(name)] = self._at(key.start_mark)
            values[name] = self._value(inner, (*path, str(name)), depth + 1)
        return values

    def _scalar(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401
        if not isinstance(node, yaml.ScalarNode):
            return None
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            value = node
        is_plain = value is None or isinstance(value, str | int | float)
        if is_plain and not (isinstance(value, float) and not math.isfinite(value)):
            return value
        kind = node.tag.rpartition(":")[2]
        allowed = "a text, a finite number, a boolean, null, a list or a mapping"
        self._problems.append(_problem(self._at(node.start_mark), f"a scalar of kind {kind}", allowed, path))
        return None

    def _at(self, mark: yaml.Mark | None) -> str:
        return self._file if mark is None else f"{self._file}:{mark.line + 1}"


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


def _put(values: dict[str, Any], path: Path, value: object) -> bool:
    """Whether `value` could be put at `path`, where nothing was yet."""
    name, *deeper = path
    if deeper:
        inner = values.setdefault(name, {})
        return isinstance(inner, dict) and _put(inner, tuple(deeper), value)
    is_free = name not in values
    values.setdefault(name, value)
    return is_free


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        (twice, _) = Counter(names).most_common(1)[0]
        raise ValueError(f"{twice!r} twice in one object")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def _problem(place: str, found: str, expected: str, path: Path = ()) -> ArgumentFinding:
    return ArgumentFinding(severity="error", place=place, path=path, found=found, expected=expected)


def _invalid(place: str, found: str, expected: str) -> EngineArgsInvalid:
    return EngineArgsInvalid([_problem(place, found, expected)])
