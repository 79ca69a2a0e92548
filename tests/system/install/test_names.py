"""A wheel has no top-level name but ours, and its benches are there all the same."""

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.requirements import OURS
from tests.system.install.environments import python_with

WHEELS = sorted((ROOT / "build" / "wheel").glob("*.whl"))
IMPORT_IN_A_CHILD = """
import subprocess, sys
from kv_runtime.extras import reach_tools
try:
    import bench
except ModuleNotFoundError:
    reach_tools()
    import bench, dashboards
    sys.exit(subprocess.run([sys.executable, "-P", "-c", "import bench.processes"]).returncode)
sys.exit("bench is a top-level name")
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not WHEELS, reason="build/wheel has no wheel: `make wheel` makes it"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(WHEELS[0], tmp_path_factory.mktemp("installed"))


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-P", *arguments]
    return subprocess.run(command, cwd=python.parent, capture_output=True, text=True, check=False)


def test_all_top_level_names_are_ours() -> None:
    with zipfile.ZipFile(WHEELS[0]) as wheel:
        names = {name.partition("/")[0] for name in wheel.namelist()}
    others = {name for name in names - set(OURS) if not name.startswith("kv_router-")}
    assert others == set()
    assert set(OURS) <= names


def test_the_web_page_is_in_the_wheel_and_in_the_source() -> None:
    expected = {f"router/web/assets/{each.name}" for each in (ROOT / "router" / "web" / "assets").iterdir()}
    with zipfile.ZipFile(WHEELS[0]) as wheel:
        assert expected <= set(wheel.namelist())
    (source,) = WHEELS[0].parent.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert expected <= {name.partition("/")[2] for name in archive.getnames()}


def test_the_benches_are_reached_here_and_in_children(python: Path) -> None:
    done = run(python, "-c", IMPORT_IN_A_CHILD)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_benches_have_commands(python: Path) -> None:
    done = run(python, "-m", "router", "bench", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dataplane" in done.stdout


def test_the_dashboards_are_written(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "router", "dashboards", "--write", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*.json"))


def test_the_demo_runs(python: Path) -> None:
    done = run(python, "-m", "router", "demo", "--workers", "2")
    assert done.returncode == 0, done.stderr
