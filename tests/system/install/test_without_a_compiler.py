"""A wheel that is built where no C++ compiler is: it installs, the agent works, and the router says what it lacks."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.system.install.environments import python_with

BUILDER = ROOT / "build" / "wheel" / "builder" / "bin" / "python"
"""The empty environment in which `make wheel` builds."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BUILDER.exists(), reason="build/wheel/builder is missing: `make wheel` makes it"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the wheel, and what pip printed with `-v` while it built it."""
    target = tmp_path_factory.mktemp("wheel")
    environment = {**os.environ, "CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"}
    command = [str(BUILDER), "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", str(target), str(ROOT)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    (wheel,) = target.glob("*.whl")
    return wheel, done.stdout


@pytest.fixture(scope="module")
def python(build: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the wheel, which has the libraries of this one."""
    return python_with(tmp_path_factory.mktemp("installed"), build[0])


def test_the_wheel_is_pure_and_the_build_says_why(build: tuple[Path, str]) -> None:
    wheel, printed = build
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "WARNING: this wheel has no C++: of its commands worker-agent alone runs" in printed


@pytest.mark.parametrize("program", ["router", "indexer"])
def test_a_program_that_needs_the_extension_says_so_in_one_line(python: Path, program: str) -> None:
    done = subprocess.run([str(python), "-P", "-m", program, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"{program}: the index's C++ extension is missing (")


def test_the_agent_has_all_its_commands(python: Path) -> None:
    done = subprocess.run(
        [str(python), "-P", "-m", "worker_agent", "serve", "--help"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
