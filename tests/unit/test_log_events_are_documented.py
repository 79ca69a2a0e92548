"""The events of the log and docs/reference/log_events.md: both name the same."""

import ast
import re
from collections.abc import Iterator

from tests.support.paths import ROOT

LEVELS = ("info", "warning", "error", "exception")
NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)+")


def modules() -> Iterator[list[ast.AST]]:
    """Yield the nodes of each module."""
    for package in ("kv_runtime", "indexer", "router", "worker_agent"):
        for path in (ROOT / package).rglob("*.py"):
            yield list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def constants(node: ast.expr) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and NAME.fullmatch(each.value):
            yield each.value


def is_method_of_a_log(node: ast.AST) -> bool:
    """Return whether it is `_log.warning`, or a choice of such methods."""
    match node:
        case ast.Attribute(attr=level):
            return level in LEVELS
        case ast.IfExp(body=body, orelse=orelse):
            return is_method_of_a_log(body) or is_method_of_a_log(orelse)
    return False


def variables_of_methods(nodes: list[ast.AST]) -> set[str]:
    """Return the names of variables that are a method of a log, such as `say` of `say = _log.info`."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and is_method_of_a_log(node.value)]
    return {each.id for node in assigned for each in node.targets if isinstance(each, ast.Name)}


def events_of_the_code() -> set[str]:
    """Return the names that logs are called with, and those of variables that they are called with."""
    found = set[str]()
    for nodes in modules():
        methods = variables_of_methods(nodes)
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(attr=level), args=[ast.Constant(value=str(name)), *_]) if (
                    level in LEVELS
                ):
                    found.add(name)
                case ast.Call(func=ast.Name(id=method), args=[ast.Constant(value=str(name)), *_]) if method in methods:
                    found.add(name)
                case ast.Assign(targets=[ast.Name(id="event" | "what")], value=value):
                    found.update(constants(value))
    return {name for name in found if NAME.fullmatch(name)}


def documented_events() -> list[str]:
    text = (ROOT / "docs" / "reference" / "log_events.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_every_event_of_the_log_is_documented_once_and_no_other() -> None:
    documented = documented_events()
    assert sorted(documented) == sorted(events_of_the_code())
