"""The functions between the first byte that is read of a request and the first byte that is sent to its worker.

Both happen in one callback of the event loop: the path is what that callback calls before it writes to the socket.
A function only forwards if its body is one statement, a call whose arguments are names, attributes or constants.
"""

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.request.stages import WRITES, Step, is_ours, named_stage


class CallPath(NamedTuple):
    """The path: the number of calls, and the functions of this repository among the called.

    `stack` are those that have not returned when the first byte is sent, the outermost first; `forwarding` only
    forward.
    """

    calls: int
    functions: tuple[str, ...]
    stack: tuple[str, ...]
    forwarding: tuple[str, ...]


def files_of(places: Iterable[str]) -> set[str]:
    """Return the modules of functions."""
    return {place.partition(":")[0] for place in places}


def path_steps(steps: Iterable[Step]) -> tuple[list[Step], list[Step]]:
    """Return the calls of the first callback that writes to a socket, up to that, and which have not returned then."""
    stack, calls = list[Step](), list[Step]()
    for step in steps:
        if not step.is_call:
            del stack[-1:]
            continue
        if not stack:
            calls = []
        if named_stage(step.place) == WRITES:
            return calls, stack
        stack.append(step)
        calls.append(step)
    return [], []


def call_path(steps: Sequence[Step]) -> CallPath:
    """Return the path in a trace of at least one request; its sources are read."""
    calls, stack = path_steps(steps)
    ours = {step.place: step for step in calls if is_ours(step.place)}
    return CallPath(
        calls=len(calls),
        functions=tuple(sorted(ours)),
        stack=tuple(step.place for step in stack if is_ours(step.place)),
        forwarding=tuple(sorted(place for place, step in ours.items() if _forwards(Path(step.file), step.line))),
    )


def _forwards(file: Path, line: int) -> bool:
    found = function_at(file.read_text(), line)
    return found is not None and only_forwards(found)


def function_at(source: str, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function whose definition, or first decorator, is in this line; None: there is none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min((each.lineno for each in node.decorator_list), default=node.lineno)
            if line in {first, node.lineno}:
                return node
    return None


def only_forwards(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the function does nothing but call another with what it has."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Call):
        return False
    return all(_is_simple(each) for each in (value.func, *value.args, *(each.value for each in value.keywords)))


def _is_simple(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Starred):
        node = node.value
    return isinstance(node, ast.Name | ast.Constant)
