"""Wheels have no top-level name but ours; the router's has no tools, and with that of the tools they are there."""

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.requirements import OURS
from tests.system.install.environments import python_with

BUILT = ROOT / "build" / "wheel"
WHEELS = [each for name in ("kv_router", "kv_router_tools") for each in BUILT.glob(f"{name}-*.whl")]
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
    pytest.mark.skipif(len(WHEELS) < 2, reason="build/wheel has no wheel: `make wheel` makes it"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(tmp_path_factory.mktemp("installed"), *WHEELS)


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
    (source,) = BUILT.glob("kv_router-*.tar.gz")
    with tarfile.open(source) as archive:
        assert expected <= {name.partition("/")[2] for name in archive.getnames()}


def test_the_routers_wheel_has_no_tools() -> None:
    with zipfile.ZipFile(WHEELS[0]) as wheel:
        assert not [each for each in wheel.namelist() if "/bench/" in each]


def test_the_wheel_of_the_tools_has_nothing_else() -> None:
    assert WHEELS[1].name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(WHEELS[1]) as wheel:
        names = [each for each in wheel.namelist() if ".dist-info/" not in each]
    assert names
    assert all(each.startswith("kv_runtime/tools/bench/") and each.endswith(".py") for each in names)


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
