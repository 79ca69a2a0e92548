"""Loads configuration: one frozen tree per process, read once. Flag > environment `KVROUTER_*` > YAML > default.

`KVROUTER_POLICY__TEMPERATURE=0.2` sets `policy.temperature`. All problems are reported together, each with path, what
was found and what is allowed. No problem shows a secret: neither a secret's value, nor text that could not be parsed.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from yaml.reader import ReaderError

from kv_runtime.config.rendering import section_of, without_user
from kv_runtime.config.sections import Section, Settings
from kv_runtime.config.words import allowed

ENV_PREFIX = "KVROUTER_"
_NESTED = "__"
_NEAREST_CHARACTERS_MAX = 80
_QUOTED_NAME = re.compile(r"(alias|anchor|tag|handle) (['\"]).*\2")


class _Loader(yaml.SafeLoader):
    """Loads a document; refuses a key that is twice in a mapping, and a value that its type does not allow.

    Both errors are `MarkedYAMLError`, which has the place.
    Source: YAML 1.2.2, 3.2.1.1: the keys of a mapping are unique.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - as PyYAML's
        """Return the mapping; raise for a key that it has twice. Mappings merged into it (`<<`) may have its keys."""
        node, known = super().compose_mapping_node(anchor), set[tuple[str, str]]()
        for key in (each for each, _ in node.value if isinstance(each, yaml.ScalarNode)):
            if (key.tag, key.value) in known:
                problem = f"found {key.value} again, allowed once"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            known.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - as PyYAML's
        """Return the value of the node."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # digits, dates and explicit tags raise various errors
            problem = "found a value that its type does not allow"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def load_yaml(text: str) -> object:
    """Return the value that the text describes; None if there is none.

    An error has line, column and problem. It does not quote the document, which may have secrets; PyYAML would quote
    the line, and the names of aliases, anchors and tags.

    Raises:
        yaml.YAMLError: the text is no YAML, has a key twice in a mapping, or has something other than mappings, lists,
            texts and numbers.
    """
    try:
        value: object = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        said = ", ".join(each for each in (error.context, error.problem) if each)
        raise yaml.YAMLError(place + _QUOTED_NAME.sub(r"\1", said)) from error
    except ReaderError as error:
        raise yaml.YAMLError(f"found character #x{error.character:04x}: {error.reason}") from error
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    return value


class ConfigurationError(Exception):
    """One or more values are invalid; `problems` names each by its path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(["configuration:", *(f"  {problem}" for problem in problems)]))
        self.problems = problems


SettingsT = TypeVar("SettingsT", bound=Settings)
SectionT = TypeVar("SectionT", bound=Section)


def load_settings(
    kind: type[SettingsT],
    *,
    file: Path | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> SettingsT:
    """Return the effective tree.

    `assignments` are `section.key=value` flags, `flags` maps dotted paths (`nats.url`) to values; None is ignored.

    Raises:
        ConfigurationError: with every problem found.
    """
    problems: list[str] = []
    tree = _from_file(file, problems) if file else {}
    given = [(path, value) for path, value in (flags or {}).items() if value is not None]
    for path, value in [*_from_environment(kind, problems), *_assigned(kind, assignments, problems), *given]:
        _put(tree, path, value, problems)
    try:
        settings = kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigurationError([*problems, *(_problem(kind, found) for found in error.errors())]) from error
    problems += _masks(settings)
    if problems:
        raise ConfigurationError(problems)
    return settings


def load_section(kind: type[SectionT], file: Path) -> SectionT:
    """Return a section that has a YAML file of its own.

    Raises:
        ConfigurationError: with every problem found, each with the file's name.
    """
    problems: list[str] = []
    tree = _from_file(file, problems)
    try:
        if not problems:
            return kind.model_validate(tree)
    except ValidationError as error:
        problems += [f"{file}: {_problem(kind, found)}" for found in error.errors()]
    raise ConfigurationError(problems)


def given_paths(
    kind: type[BaseModel], assignments: Iterable[str] = (), flags: Mapping[str, Any] | None = None
) -> frozenset[str]:
    """Return the paths set on the command line. A section given as a mapping counts as the paths of its fields."""
    given = [(path, value) for path, value in (flags or {}).items() if value is not None]
    return frozenset(
        f"{path}.{name}" if name else path
        for path, value in [*_assigned(kind, assignments, []), *given]
        for name in (value if isinstance(value, Mapping) else [""])
    )


def _assigned(kind: type[BaseModel], assignments: Iterable[str], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for assignment in assignments:
        path, found, text = assignment.partition("=")
        path = path.strip()
        try:
            value = load_yaml(text) if text.strip() else ""
        except yaml.YAMLError as error:
            problems.append(f"--set {path}: {error}")
            continue
        if not found or not path:
            problems.append("--set: found no name before a =, allowed section.key=value")
        elif _kind_at(kind, path.split(".")) in (str, SecretStr) and not isinstance(value, str | list | dict | None):
            yield path, text  # a text that YAML would parse as a number or a date
        else:
            yield path, value


def _from_file(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        tree = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"{file}: {error}")
        return {}
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{file}: found {type(tree).__name__}, allowed a mapping of sections")
        return {}
    return {str(name): section for name, section in tree.items() if section is not None}


def _from_environment(kind: type[BaseModel], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield paths and values, sections before their fields; lists and mappings are JSON."""
    for name in sorted(os.environ, key=lambda name: (name.count(_NESTED), name)):
        if not name.upper().startswith(ENV_PREFIX):
            continue
        path, text = name[len(ENV_PREFIX) :].lower().split(_NESTED), os.environ[name]
        kind_there = _kind_at(kind, path)
        if kind_there is None:
            problems.append(_unknown(kind, path, shown=name))
            continue
        try:
            is_text = section_of(kind_there) is None and get_origin(kind_there) not in (list, dict, tuple)
            yield ".".join(path), text if is_text else json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}: allowed JSON ({error})")


def _kind_at(kind: Any, path: Sequence[object]) -> Any:  # noqa: ANN401 - whatever a field is declared as
    """Return the declared type of the field at `path`, or of the field that contains `path`; None: unknown.

    A whole number in `path` is the place of a section in a list.
    """
    for name in path:
        if isinstance(name, int):
            kind = _section_in(kind) or kind
            continue
        if (section := section_of(kind)) is None:
            return kind
        field = section.model_fields.get(str(name))
        if field is None:
            return None
        kind = field.annotation
    return kind


def _put(tree: dict[str, Any], path: str, value: object, problems: list[str]) -> None:
    """Set the value at `path`; mappings are merged."""
    *above, last = path.split(".")
    for name in above:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            problems.append(f"{path}: {name} is given as a value and as a section")
            return
        tree = below
    if isinstance(value, Mapping) and isinstance(tree.get(last), dict):
        for name, inner in value.items():
            _put(tree[last], str(name), inner, problems)
    else:
        tree[last] = value


def _unknown(kind: type[BaseModel], path: Sequence[object], *, shown: str) -> str:
    """Return the text about an unknown key, with the keys of its section and the nearest of all keys."""
    section, names = kind, [str(name) for name in path if not isinstance(name, int)]  # an int is an index in a list
    for name in names[:-1]:
        section = _section_in(_kind_at(section, [name])) or section
    return f"{shown}: {unknown_key('.'.join(names), section.model_fields, _paths(kind))}"


def _section_in(kind: Any) -> type[BaseModel] | None:  # noqa: ANN401
    """Return the section class of a field, or of the items of a list; None if it has none."""
    return next((section for each in (kind, *get_args(kind)) if (section := section_of(each))), None)


def unknown_key(found: str, known: Iterable[str], candidates: Iterable[str] = ()) -> str:
    """Return the text about an unknown key, with the `known` keys and the nearest one of `candidates`.

    Without `candidates` it has the nearest of `known`. A candidate with the same last part is nearer than any other.
    For a key of more than 80 characters there is no nearest: the search time grows with the square of its length.
    """
    known = list(known)
    candidates = list(candidates) or known
    if len(found) > _NEAREST_CHARACTERS_MAX:
        candidates = []
    last = found.rpartition(".")[2]
    namesakes = [path for path in candidates if path.rpartition(".")[2] == last]
    nearest = get_close_matches(found, namesakes, n=1, cutoff=0.0) or get_close_matches(found, candidates, n=1)
    return f"unknown; allowed: {', '.join(known)}" + "".join(f"; nearest: {path}" for path in nearest)


def _paths(kind: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the paths of all sections and fields."""
    for name, field in kind.model_fields.items():
        yield above + name
        if (section := _section_in(field.annotation)) is not None:
            yield from _paths(section, f"{above}{name}.")


def _masks(settings: BaseModel, above: str = "") -> Iterator[str]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _masks(value, f"{above}{name}.")
        elif isinstance(value, SecretStr) and value.get_secret_value() == str(SecretStr("any")):
            yield f"{above}{name}: found the mask of a shown secret, allowed the secret itself"


def _is_secret(kind: object) -> bool:
    return kind is SecretStr or SecretStr in get_args(kind)


def _problem(kind: type[BaseModel], error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, which it does not export
    """Return a problem as one line. It has the found value, unless that is a secret or sections, which may have one."""
    if error["type"] == "extra_forbidden":
        shown = ".".join(map(str, error["loc"]))  # may have a secret: `{token:secret}` is a key in YAML
        return _unknown(kind, error["loc"], shown=re.sub(r"[^\w.-].*", "...", shown, flags=re.DOTALL))
    kind_there = _kind_at(kind, error["loc"])
    is_shown = kind_there is not None and not _is_secret(kind_there) and _section_in(kind_there) is None
    is_shown = is_shown and error["type"] != "missing"  # what is found then is the section
    found = f"found {without_user(repr(error['input']))}, " if is_shown else ""
    return f"{'.'.join(map(str, error['loc']))}: {found}{allowed(error)}"
