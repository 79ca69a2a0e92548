"""Pages that are written by hand, those in `docs/reference/` first, name what the code has."""

import ast
import re
from collections.abc import Iterator

from router.queue.waiting import REFUSAL_REASONS
from tests.support.paths import ROOT
from tests.support.reference import COMMANDS, FOLDER, settings_of

PACKAGES = ("kv_runtime", "indexer", "router", "worker_agent")
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
POSITIONS = {"invalid": 2, "unavailable": 1, "Refusal": 3, "_finish_cut": 1}
"""The argument that is the code, of functions that take it by position."""
NO_BOUNDS = {
    "engine.default_max_tokens": "what an answer may have where its request does not say",
}
"""Settings with `max` in their name that bound no queue, buffer or cache."""


def words(node: ast.AST | None) -> Iterator[str]:
    """Yield the texts in an expression that may be codes."""
    for each in () if node is None else ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and CODE.fullmatch(each.value):
            yield each.value


def codes_of(node: ast.AST) -> Iterator[str]:
    """Yield the codes of errors in one node: arguments, `code = ...`, and the table of the data plane."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            yield from (code for each in keywords if each.arg == "code" for code in words(each.value))
            if name in POSITIONS and len(args) > POSITIONS[name]:
                yield from words(args[POSITIONS[name]])
        case ast.Assign(targets=[ast.Name(id="code")], value=ast.IfExp(body=body, orelse=orelse)):
            yield from (*words(body), *words(orelse))
        case ast.Assign(targets=[ast.Name(id="_CODES")], value=value):
            yield from words(value)


def codes_of_the_code() -> set[str]:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "doctor" not in path.parts]
    nodes = (node for path in modules for node in ast.walk(ast.parse(path.read_text())))
    return {*REFUSAL_REASONS, *(code for node in nodes for code in codes_of(node))}


def names_of_settings() -> set[str]:
    return {each.path for kind in COMMANDS.values() for each in settings_of(kind)}


def test_the_codes_of_errors_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (FOLDER / "errors.md").read_text(), re.MULTILINE)
    documented = {code for row in rows for code in re.findall(r"(?<!\()`([a-z_]+)`", row)} - {"error"}
    assert documented == codes_of_the_code()


def test_every_setting_that_is_a_bound_has_its_outcome_when_full() -> None:
    text = (FOLDER / "bounds.md").read_text()
    bounds = {name for name in names_of_settings() if re.search(r"_max$|_max_|max_bytes", name)}
    assert {name for name in bounds if f"`{name}`" not in text} == NO_BOUNDS.keys()


def test_every_setting_and_module_that_these_pages_name_exists() -> None:
    settings = names_of_settings()
    sections = {name.split(".")[0] for name in settings}
    for name in ("bounds.md", "errors.md", "log_events.md", "../MIGRATING.md"):
        words_of_page = re.findall(r"`([\w./]+)(?:=[\w-]+)?`", (FOLDER / name).read_text())
        named = {word for word in words_of_page if word.split(".")[0] in sections and "." in word}
        paths = {word for word in words_of_page if "/" in word and word.split("/")[0] in (*PACKAGES, "kv_protocol")}
        assert named - settings == set(), name
        assert {path for path in paths if not (ROOT / path).exists()} == set(), name
