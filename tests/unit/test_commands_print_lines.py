"""What a command prints goes by `print_lines` or `print_json`, which escape names that came from the network."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOKS = [
    *(path for path in sorted((ROOT / "router/cli").glob("*.py")) if path.stem not in ("pools", "processes", "serve")),
    *sorted((ROOT / "indexer/commands").glob("*.py")),
    *(ROOT / "bench/what_if" / f"{name}.py" for name in ("command", "tune")),
]
"""All commands that read the log or ask a process; the others start one, and print its own addresses."""
FOR_MACHINES = {"render", "report_page"}
"""What makes YAML and HTML."""


def echoed(source: str) -> Iterator[ast.Call]:
    """Yield what is printed without `print_lines`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "print"):
            yield node


def is_for_machines(call: ast.Call) -> bool:
    what = call.args[0]
    return isinstance(what, ast.Constant) or (
        isinstance(what, ast.Call) and ast.unparse(what.func).rpartition(".")[2] in FOR_MACHINES
    )


@pytest.mark.parametrize("path", LOOKS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_command_that_looks_prints_lines(path: Path) -> None:
    assert [ast.unparse(call) for call in echoed(path.read_text()) if not is_for_machines(call)] == []


@pytest.mark.parametrize("printed", ["name", "f'{name}'", "'\\n'.join(names)", "encode(name) if as_json else name"])
def test_a_name_that_is_printed_otherwise_is_found(printed: str) -> None:
    assert not any(map(is_for_machines, echoed(f"click.echo({printed})")))
