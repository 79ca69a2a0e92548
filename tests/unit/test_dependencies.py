"""What the packages import is declared where pyproject.toml says, and nothing else is."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT
from tests.support.requirements import declared, project

PROJECT, TOOLS = project(), project("bench")
PACKAGES = {
    "": ("kv_protocol", "kv_runtime", "worker_agent"),
    "router": ("indexer", "router", "dashboards"),
    "tools": ("bench",),
    "dev": ("tests",),
}
"""Packages by the extra that they may use beside the base."""
ELSEWHERE = {
    "worker_agent/engines/trtllm/bindings.py": {"tensorrt-llm"},  # loaded for `--engine trtllm`
    "kv_runtime/tracing/otlp.py": {"opentelemetry-sdk"},  # imported where traces are wanted
    "router/endpoint_picker/wire.py": {"protobuf"},  # imported, like the next one, where the picker is on
    "router/endpoint_picker/service.py": {"grpcio"},
}
"""Modules that use something else, in functions alone or in a module that nothing imports when it starts."""
NAMESPACES = {"opentelemetry": ["opentelemetry-sdk"], "google": ["protobuf"]}
"""Packages that many distributions share: one stands for all."""
DISTRIBUTIONS = {**packages_distributions(), **NAMESPACES}


def top_level(name: str) -> str:
    return name.partition(".")[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level names of what is imported, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (top_level(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield top_level(node.module)


@cache
def distributions_of(package: str) -> dict[str, set[str]]:
    """Return the distributions that each module of the package imports, by the module's path."""
    ours = {name for names in PACKAGES.values() for name in names}
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        names = set(imported(ast.parse(path.read_text()))) - set(sys.stdlib_module_names) - ours
        distributions = {canonicalize_name(DISTRIBUTIONS.get(name, [name])[0]) for name in names}
        found[path.relative_to(ROOT).as_posix()] = {str(each) for each in distributions}
    return found


def names(*extras: str) -> set[str]:
    return {canonicalize_name(each.name) for each in declared(*extras)}


@pytest.mark.parametrize("extra", ["", "router", "tools"])
def test_what_is_imported_is_declared(extra: str) -> None:
    allowed = names(*([extra] if extra else []))
    undeclared = {
        path: sorted(rest)
        for package in PACKAGES[extra]
        for path, found in distributions_of(package).items()
        if (rest := found - allowed - ELSEWHERE.get(path, set()))
    }
    assert undeclared == {}


@pytest.mark.parametrize("extra", ["", "router", "tools"])
def test_what_is_declared_is_imported(extra: str) -> None:
    of = TOOLS if extra == "tools" else PROJECT
    lines = of["dependencies"] if extra in ("", "tools") else of["optional-dependencies"][extra]
    own = {canonicalize_name(Requirement(line).name) for line in lines} - {"kv-router"}
    used = {name for package in PACKAGES[extra] for found in distributions_of(package).values() for name in found}
    assert own - used == set()


def test_router_and_tools_require_each_other_in_the_same_version() -> None:
    version = PROJECT["version"]
    assert TOOLS["version"] == version
    assert PROJECT["optional-dependencies"]["tools"] == [f"kv-router-tools=={version}"]
    assert f"kv-router[router,embedded]=={version}" in TOOLS["dependencies"]


def test_the_list_of_exceptions_is_not_longer_than_needed() -> None:
    for path, excepted in ELSEWHERE.items():
        assert excepted <= distributions_of(top_level(path.replace("/", ".")))[path], path


def test_exceptions_are_imported_when_a_function_runs() -> None:
    for path, excepted in ELSEWHERE.items():
        if path == "kv_runtime/tracing/otlp.py":
            continue  # a function imports the module
        if path.startswith("router/endpoint_picker/"):
            continue  # likewise
        tree = ast.parse(Path(ROOT, path).read_text())
        at_once = {
            name
            for node in tree.body
            for name in imported(node)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        loaded = {canonicalize_name(DISTRIBUTIONS.get(name, [name])[0]) for name in at_once}
        assert loaded & excepted == set(), path


def test_every_requirement_has_a_floor_and_a_cap() -> None:
    for each in declared("router", "embedded", "tools"):
        operators = {specifier.operator for specifier in each.specifier}
        assert operators == {">=", "<"}, str(each)


def test_every_requirement_says_why_it_is_there() -> None:
    lines = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")
    base = lines[0].split("dependencies = [")[1].splitlines()
    extras = lines[1].split("trtllm = ")[0].splitlines()
    for line in (*base, *extras):
        assert not line.startswith('    "') or "  # " in line, line
