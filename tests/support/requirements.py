"""What pyproject.toml requires, by extra; environments that have exactly that; the oldest releases that are allowed.

`python -m tests.support.requirements [EXTRA ...]` prints the floors as pins.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.support.paths import ROOT

OURS = ("kv_protocol", "kv_runtime", "worker_agent", "indexer", "router")
"""Top-level packages of the router's wheel."""


def project(directory: str = "") -> dict[str, Any]:
    """Return what the pyproject.toml of a directory says of its distribution; in `bench` it is that of the tools."""
    found: dict[str, Any] = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
    return found


def declared(*extras: str) -> list[Requirement]:
    """Return what kv-router requires with these extras, and what those of ours that it requires do."""
    ours = {each["name"]: each for each in (project(), project("bench"))}
    found, known = list[Requirement](), set[tuple[str, str]]()
    waiting = [("kv-router", each) for each in ("", *extras)]
    while waiting:
        name, extra = wanted = waiting.pop()
        if wanted in known:
            continue
        known.add(wanted)
        of = ours[name]
        for each in map(Requirement, of["optional-dependencies"][extra] if extra else of["dependencies"]):
            if each.name in ours:
                waiting += [(each.name, included) for included in ("", *each.extras)]
            else:
                found.append(each)
    return found


def floors(*extras: str) -> list[str]:
    """Return a pin of each requirement to the oldest release that its range allows.

    Raises:
        ValueError: a requirement has no floor.
    """
    return [f"{each.name}=={_floor(each)}" for each in declared(*extras)]


def _floor(requirement: Requirement) -> str:
    for each in requirement.specifier:
        if each.operator in {">=", "=="}:
            return each.version
    raise ValueError(f"{requirement}: no floor")


def closure(*extras: str) -> set[NormalizedName]:
    """Return the distributions that pip installs beside ours with these extras, as far as they are installed here."""
    found: set[NormalizedName] = set()
    waiting = [(canonicalize_name(each.name), each.extras) for each in declared(*extras)]
    while waiting:
        name, wanted = waiting.pop()
        if name in found or (distribution := _installed(name)) is None:
            continue
        found.add(name)
        for line in distribution.requires or ():
            each = Requirement(line)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((canonicalize_name(each.name), each.extras))
    return found


def lay_out(directory: Path, *extras: str) -> None:
    """Make `directory` what site-packages is after `pip install 'kv-router[extras]'`: links, and our own metadata."""
    for package in OURS:
        _link(ROOT / package, directory / package)
    for package, extension in (("indexer", "_core"), ("router", "_fold")):
        _put_extension(directory, package, extension)
    tools = directory / "kv_runtime" / "tools"
    _link(ROOT / "dashboards", tools / "dashboards")
    if "tools" in extras:
        _link(ROOT / "bench", tools / "bench")
        _describe(directory, "kv-router-tools")
    for name in closure(*extras):
        for entry in _top_level(metadata.distribution(name)):
            (directory / entry.name).symlink_to(entry)
    _describe(directory, "kv-router", *_requires())


def _describe(directory: Path, name: str, *lines: str) -> None:
    info = directory / f"{name.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(("Metadata-Version: 2.1", f"Name: {name}", "Version: 0", *lines)))


def _link(source: Path, target: Path) -> None:
    """Make `target` a directory with links to what `source` has, so that more can be put into it."""
    target.mkdir(parents=True)
    for each in source.iterdir():
        (target / each.name).symlink_to(each)


def _put_extension(directory: Path, package: str, name: str) -> None:
    """Link what was built here of the package's C++."""
    found = find_spec(f"{package}.native.{name}")
    native = directory / package / "native"
    native.unlink()
    _link(ROOT / package / "native", native)
    if found is not None and found.origin is not None:
        (native / Path(found.origin).name).symlink_to(found.origin)


def _top_level(distribution: metadata.Distribution) -> set[Path]:
    root = Path(str(distribution.locate_file("")))
    names = {file.parts[0] for file in distribution.files or ()}
    return {root / name for name in names if name not in {"..", "__pycache__"} and (root / name).exists()}


def _requires() -> Iterator[str]:
    yield from (f"Requires-Dist: {each}" for each in project()["dependencies"])
    for extra, requirements in project()["optional-dependencies"].items():
        yield f"Provides-Extra: {extra}"
        yield from (f"Requires-Dist: {_for_extra(Requirement(each), extra)}" for each in requirements)


def _for_extra(requirement: Requirement, extra: str) -> str:
    marker = f'extra == "{extra}"'
    requirement_marker = f"({requirement.marker}) and {marker}" if requirement.marker else marker
    requirement.marker = None
    return f"{requirement}; {requirement_marker}"


def _installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.stdout.write("\n".join(floors(*sys.argv[1:])) + "\n")
