"""The page of packages: what each is, and which others it imports."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.paths import ROOT

ROOTS = ("router", "indexer", "worker_agent")


def packages_page() -> str:
    """Return the packages of each process and their imports, as Markdown. Imports that others imply are left out."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Packages"
    yield ""
    yield "Made from the code by `make reference`. An arrow leads from a package to one that it imports; arrows that"
    yield "others imply are left out. None leads upwards: `pyproject.toml` has the layers."
    for root in ROOTS:
        imports = imports_of(root)
        yield f"\n## `{root}`\n"
        yield "| package | is |"
        yield "|---|---|"
        for name in imports:
            yield f"| `{name}` | {_meaning(ROOT / root / name)} |"
        yield "\n```mermaid\nflowchart TD"
        for name, others in imports.items():
            direct = others - {far for other in others for far in _all(imports, other)}
            yield from (f"    {name} --> {other}" for other in sorted(direct))
        yield "```"


def imports_of(root: str) -> dict[str, set[str]]:
    """Return the packages and modules directly in a root package, and which of each other they import."""
    folder = ROOT / root
    names = sorted(
        each.stem
        for each in folder.iterdir()
        if (each.is_dir() and any(each.rglob("*.py"))) or (each.suffix == ".py" and each.stem != "__init__")
    )
    found = {name: set[str]() for name in names}
    for name in names:
        modules = (folder / name).rglob("*.py") if (folder / name).is_dir() else [folder / f"{name}.py"]
        for module in modules:
            package = ".".join(module.relative_to(ROOT).parent.parts)
            for imported in _imported(module, package):
                parts = imported.split(".")
                if parts[0] == root and len(parts) > 1 and parts[1] in found and parts[1] != name:
                    found[name].add(parts[1])
    return found


def _imported(module: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{origin}.{each.name}" for each in node.names)


def _all(imports: Mapping[str, set[str]], name: str) -> set[str]:
    """Return what a package imports, directly or not; there are no circles."""
    return imports[name] | {far for other in imports[name] for far in _all(imports, other)}


def _meaning(place: Path) -> str:
    """Return the first sentence of the package's or module's docstring."""
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = (ast.get_docstring(ast.parse(source.read_bytes())) or "") if source.exists() else ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
