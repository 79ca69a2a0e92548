"""`router up`: fleets of real processes that are ready, reported when one dies, and gone when it is told to end."""

import json
import os
import signal
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL
from tests.system.e2e.test_signals import END_S, Started, alive, started
from tests.unit.kv_runtime.model_files import QWEN_TEMPLATE, qwen_like, write_model

PORTS = ("--port", "0", "--control-port", "0", "--nats-port", "0")


def ready(fleet: Started) -> str:
    """Return the endpoint of a fleet that is ready."""
    url = fleet.line_with("router on").split()[2]
    fleet.line_with("ready")
    return url


def completed(url: str) -> dict[str, str]:
    """Return the headers of a completion."""
    body = json.dumps({"model": MODEL, "prompt": list(range(1, 200)), "max_tokens": 4}).encode()
    request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})  # noqa: S310 - loopback
    with urlopen(request, timeout=30) as response:  # noqa: S310
        assert json.loads(response.read())["usage"]["completion_tokens"] == 4
        return {name.lower(): value for name, value in response.headers.items()}


def pid_of(fleet: Started, name: str) -> int:
    """Return the process id that was printed first."""
    line = next(line for line in fleet.output.splitlines() if line.startswith(f"{name} ") and "pid " in line)
    return int(line.rpartition(" ")[2].rstrip(")"))


def test_a_fleet_serves_reports_a_worker_that_dies_and_ends_without_a_process(tmp_path: Path) -> None:
    with started("router", "up", "--workers", "2", "--logs", str(tmp_path), *PORTS) as fleet:
        url = ready(fleet)
        assert completed(url)["x-worker-instance-id"] in ("w0", "w1")
        os.kill(pid_of(fleet, "w1"), signal.SIGKILL)
        fleet.line_with(f"w1 ended with -9: {tmp_path}/w1.log")
        assert completed(url)["x-worker-instance-id"] == "w0"
        children = fleet.children()
        fleet.signal(signal.SIGTERM)
        assert fleet.ended() == 0
        assert fleet.output.endswith("stopped\n")
        assert not alive(children)
    assert {each.name for each in tmp_path.iterdir()} == {"router.log", "w0.log", "w1.log"}
    assert "worker w0 on" in (tmp_path / "w0.log").read_text()


def test_prompts_and_answers_are_computed_by_workers_of_their_own() -> None:
    with started("router", "up", "--prefill", "1", "--decode", "1", *PORTS) as fleet:
        headers = completed(ready(fleet))
        assert (headers["x-prefill-instance-id"], headers["x-worker-instance-id"]) == ("p0", "d0")
        fleet.signal(signal.SIGINT)
        assert fleet.ended() == 0, fleet.output


def test_router_and_workers_read_the_same_text(tmp_path: Path) -> None:
    write_model(tmp_path, qwen_like(), QWEN_TEMPLATE)
    with started("router", "up", "--workers", "1", "--text", str(tmp_path), *PORTS) as fleet:
        control = fleet.line_with("router on").partition("control plane ")[2].partition(",")[0]
        fleet.line_with("ready")
        with urlopen(f"{control}/v1/workers", timeout=30) as response:  # noqa: S310 - loopback
            (worker,) = json.loads(response.read())["workers"]
        assert worker["differs"] == []
        fleet.signal(signal.SIGTERM)
        assert fleet.ended() == 0


def test_a_worker_that_dies_is_started_again_and_no_process_outlives_the_command_that_was_killed() -> None:
    with started("router", "up", "--workers", "1", "--restart", *PORTS) as fleet:
        ready(fleet)
        os.kill(pid_of(fleet, "w0"), signal.SIGKILL)
        again = int(fleet.line_with("w0 runs again").rpartition(" ")[2])
        assert psutil.pid_exists(again)
        children = fleet.children()
        assert len(children) == 3
        fleet.process.kill()
        assert fleet.ended() == -signal.SIGKILL
        _, still_there = psutil.wait_procs(children, timeout=END_S)
        if sys.platform == "linux":  # only Linux tells a process of its parent's death
            assert not alive(still_there)


async def test_a_router_that_is_started_again_has_its_former_addresses() -> None:
    async with FleetProcesses(FleetShape(workers=1)) as fleet:
        await fleet.router.end()
        await fleet.start_again("router")
        await fleet.until_ready()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--prefill", "1"), 2, "found one of --prefill and --decode, allowed both or none"),
        (("--workers", "0"), 2, "found no worker, allowed --workers"),
        (("--routers", "2"), 2, "found --routers without --nats-servers, allowed 1 router, or 1 to 5 servers"),
        (("--nats-servers", "3"), 2, "found --nats-port with --nats-servers, allowed one of them"),
        (("--set", "data.drain_s=-1"), 1, "data.drain_s"),
        (("--worker-set", "engine.nothing=1"), 1, "engine.nothing"),
    ],
)
def test_what_cannot_be_started_is_said(arguments: tuple[str, ...], code: int, words: str) -> None:
    with started("router", "up", *arguments, *PORTS) as fleet:
        assert fleet.ended() == code
        assert words in fleet.output
        assert "Traceback" not in fleet.output
