"""A wheel that is built where no C++ compiler is: it installs, it works, and it says what it lacks."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from bench.processes import ChildProcess
from tests.support.paths import ROOT
from tests.system.install.environments import python_with

BUILDER = ROOT / "build" / "wheel" / "builder" / "bin" / "python"
"""The empty environment in which `make compiled` builds."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BUILDER.exists(), reason="build/wheel/builder is missing: `make compiled` makes it"),
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
    return python_with(build[0], tmp_path_factory.mktemp("installed"))


def test_the_wheel_is_pure_and_the_build_says_why(build: tuple[Path, str]) -> None:
    wheel, printed = build
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "WARNING: this wheel has no machine code (index: Python, hot path: interpreted)" in printed


async def test_the_router_says_at_its_start_what_it_lacks(python: Path) -> None:
    command = [str(python), "-P", "-m", "router", "--port", "0", "--control-port", "0", "--set", "nats.port=0"]
    router = ChildProcess("router", command)
    async with asyncio.TaskGroup() as group:
        await router.start(group)
        try:
            line = await router.line_with("running")
        finally:
            await router.end()
    assert line.split(maxsplit=1)[1] == "index: Python, hot path: interpreted"
