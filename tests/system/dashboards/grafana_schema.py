"""`python -m tests.system.dashboards.grafana_schema`: TypeScript checks the dashboards against Grafana's own types.

Each dashboard becomes a TypeScript file that says `satisfies Plain<Dashboard>`, where `Plain` lets a text stand for the
enum value with that text. Keys that Grafana reads and its types do not have are left out first (`BEYOND`). npm installs
the types and the compiler into `build/grafana-schema`, at fixed versions. Planted faults must be found, too.

Without npm nothing is checked, which is said. Exit code 1: a dashboard does not fit, or a planted fault was not found.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which
from typing import Any

import click

from tests.support.paths import ROOT
from tests.system.dashboards.shipped import BOARD_NAMES, board

PACKAGES = {"@grafana/schema": "13.2.2", "typescript": "5.9.3"}
BEYOND: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("templating", "list"): ("auto", "auto_count", "auto_min", "definition"),
    ("annotations", "list"): ("target", "titleFormat"),
}
"""Keys of variables and annotations.

`auto*` are of interval variables, and the SDK writes them for all; Grafana itself writes `definition`; the data source
reads `titleFormat` and the Prometheus query in `target`.
"""
PLAIN = """export type Plain<T> = T extends string ? `${T}`
  : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""
_OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "preserve", "--allowImportingTsExtensions")
Board = dict[str, Any]


def _misnamed(planted: Board) -> None:
    planted["panels"][1]["gridPosition"] = planted["panels"][1].pop("gridPos")


def _unknown_unit(planted: Board) -> None:
    planted["panels"][2]["fieldConfig"]["defaults"]["unit"] = 7


def _no_such_kind(planted: Board) -> None:
    planted["templating"]["list"][0]["type"] = "datasources"


FAULTS: Mapping[str, Callable[[Board], None]] = {
    "planted-key": _misnamed,
    "planted-type": _unknown_unit,
    "planted-value": _no_such_kind,
}


def typescript(content: Board) -> str:
    """Return the file that compiles if the dashboard fits Grafana's types."""
    judged = json.loads(json.dumps(content))
    for (section, name), keys in BEYOND.items():
        judged[section][name] = [
            {key: value for key, value in each.items() if key not in keys} for each in judged[section][name]
        ]
    imports = 'import type { Dashboard } from "@grafana/schema";\nimport type { Plain } from "./plain.ts";\n'
    return f"{imports}export const board = {json.dumps(judged, indent=1)} satisfies Plain<Dashboard>;\n"


def main() -> None:
    """Judge all dashboards."""
    npm = which("npm")
    if npm is None or which("node") is None:
        click.echo("Grafana's schema was not checked: npm is not installed")
        return
    folder = ROOT / "build" / "grafana-schema"
    _install(npm, folder)
    (folder / "plain.ts").write_text(PLAIN)
    boards = {name: board(name) for name in BOARD_NAMES}
    for name, plant in FAULTS.items():
        boards[name] = board(BOARD_NAMES[0])
        plant(boards[name])
    for name, content in boards.items():
        (folder / f"{name}.ts").write_text(typescript(content))
    output = _compiled(folder, sorted(boards))
    wrong = {line.partition(".ts(")[0] for line in output.splitlines() if ".ts(" in line}
    missed, unfit = FAULTS.keys() - wrong, wrong - FAULTS.keys()
    if missed or unfit:
        sys.exit(f"{output}\nnot found: {sorted(missed)}; do not fit Grafana's types: {sorted(unfit)}")
    click.echo(f"{len(BOARD_NAMES)} dashboards fit @grafana/schema {PACKAGES['@grafana/schema']}")


def _install(npm: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.dumps({"private": True, "dependencies": PACKAGES})
    description = folder / "package.json"
    if description.exists() and description.read_text() == wanted and (folder / "node_modules" / "typescript").exists():
        return
    description.write_text(wanted)
    flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    subprocess.run([npm, "install", *flags], cwd=folder, check=True)


def _compiled(folder: Path, names: list[str]) -> str:
    compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
    files = [f"{name}.ts" for name in names]
    return subprocess.run(
        ["node", compiler, *_OPTIONS, *files], cwd=folder, capture_output=True, text=True, check=False
    ).stdout


if __name__ == "__main__":
    main()
