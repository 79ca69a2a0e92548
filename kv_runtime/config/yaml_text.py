"""Loads YAML text. A repeated key in a mapping is refused: its value would be ambiguous.

Source: YAML 1.2.2, 3.2.1.1: the keys of a mapping are unique.
"""

from collections.abc import Iterator

import yaml


class KeysRepeated(yaml.YAMLError):
    """Repeated keys; `problems` names each with its path and its lines."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def load_yaml(text: str) -> object:
    """Return the value that the text describes; None if there is none.

    Raises:
        KeysRepeated: a mapping has a key twice.
        yaml.YAMLError: the text is no YAML, or describes something other than mappings, lists, texts and numbers.
    """
    loader = yaml.SafeLoader(text)
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
    """Yield the repeated keys in the mappings of a tree; an alias may make the tree recursive."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield from _repeated_here(node, path)
        for key, value in node.value:
            yield from _repeated(value, f"{path}{key.value}.", seen)
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
