"""The extensions are built, and serve; where one is not, `router` and `indexer` say so, and `worker-agent` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from indexer.native.index import make_index
from kv_protocol.events import Tier
from kv_runtime.config.sections import IndexSection

INDEX, FOLD = "indexer.native._core", "router.native._fold"
HIDING = {
    "missing": "sys.modules[name] = None",
    "damaged": "sys.meta_path.insert(0, Damage())",
    "old": "sys.modules[name] = ModuleType(name)",
}
TYPED = """
import runpy, sys
from importlib.util import spec_from_file_location
from types import ModuleType

name, file = {name!r}, {file!r}

class Damage:
    def find_spec(self, asked, path=None, target=None):
        return spec_from_file_location(name, file) if asked == name else None

{hiding}
sys.argv = [{program!r}, "--help"]
runpy.run_module({program!r}, run_name="__main__")
"""
AGENT = """
import sys
sys.modules["indexer"] = sys.modules["router"] = None
from worker_agent.__main__ import main
print(*[command.imported().name for command in main.commands.values()])
"""


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_its_limit_is_that_of_configuration() -> None:
    index = make_index(IndexSection(memory_bytes_max=1 << 20))
    index.register(0)
    assert index.store(0, None, tuple(range(100, 200_000)), Tier.GPU, 4.0) > 0
    assert index.statistics().memory_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("program", "name", "hidden", "said"),
    [
        ("router", FOLD, "missing", "the router's C++ extension is missing"),
        ("router", FOLD, "damaged", "the router's C++ extension is missing"),
        ("router", FOLD, "old", "the router's C++ extension is of another version"),
        ("router", INDEX, "missing", "the index's C++ extension is missing"),
        ("indexer", INDEX, "missing", "the index's C++ extension is missing"),
        ("indexer", INDEX, "damaged", "the index's C++ extension is missing"),
    ],
)
def test_a_program_without_its_extension_ends_with_one_line_that_says_what_to_install(
    tmp_path: Path, program: str, name: str, hidden: str, said: str
) -> None:
    file = tmp_path / "extension.so"
    file.write_bytes(b"\x7fELF, and no more")
    ended = ran(TYPED.format(name=name, file=str(file), hiding=HIDING[hidden], program=program))
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
    assert ended.stderr.startswith(f"{program}: {said}")
    assert "C++17 compiler" in ended.stderr
    assert "pip install" in ended.stderr


def test_the_agent_has_all_its_commands_without_router_and_indexer() -> None:
    ended = ran(AGENT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {"attach", "serve"} <= set(ended.stdout.split())
