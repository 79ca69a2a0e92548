"""Loads YAML text, and refuses a key that is twice in a mapping: its value would be ambiguous.

Source: YAML 1.2.2, 3.2.1.1: the keys of a mapping are unique.

An error has line, column and problem. It does not quote the document, which may have secrets; PyYAML would quote the
line, and the names of aliases, anchors and tags.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.reader import ReaderError

_QUOTED_NAME = re.compile(r"(alias|anchor|tag|handle) (['\"]).*\2")


class KeysRepeated(yaml.YAMLError):
    """Keys are twice in a mapping; `problems` has the path and the lines of each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class _Loader(yaml.SafeLoader):
    """Loads a document; for a value that its type does not allow it raises a `MarkedYAMLError`, which has the place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - as PyYAML's
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # digits, dates and explicit tags raise various errors
            problem = "found a value that its type does not allow"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def load_yaml(text: str) -> object:
    """Return the value that the text describes; None if there is none.

    Raises:
        KeysRepeated: a mapping has a key twice.
        yaml.YAMLError: the text is no YAML, or has something other than mappings, lists, texts and numbers.
    """
    try:
        return _loaded(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        said = ", ".join(each for each in (error.context, error.problem) if each)
        raise yaml.YAMLError(place + _QUOTED_NAME.sub(r"\1", said)) from error
    except ReaderError as error:
        raise yaml.YAMLError(f"found character #x{error.character:04x}: {error.reason}") from error
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error


def _loaded(text: str) -> object:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if problems := list(_repeated(node, "", set())):
            raise KeysRepeated(problems)
        value: object = loader.construct_document(node)
    finally:
        loader.dispose()
    return value


def _repeated(node: yaml.Node, path: str, seen: set[int]) -> Iterator[str]:
    """Yield the repeated keys in a node and its children; an alias may make a node its own child."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield from _repeated_here(node, path)
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            yield from _repeated(value, f"{path}{name}.", seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _repeated(value, f"{path}{index}.", seen)


def _repeated_here(node: yaml.MappingNode, path: str) -> Iterator[str]:
    lines: dict[tuple[str, str], list[str]] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            lines.setdefault((key.tag, key.value), []).append(str(key.start_mark.line + 1))
    for (_, name), found in lines.items():
        if len(found) > 1:
            yield f"{path}{name}: found in lines {' and '.join(found)}, allowed once"
