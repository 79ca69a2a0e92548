"""`router bench sweep` on real fleets: killed, interrupted, and completed; and at an endpoint that runs already."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.e2e.test_signals import END_S, alive, started

pytestmark = pytest.mark.slow

SMALL = ("--isl", "64", "--osl", "4", "--requests", "8", "--warmup", "2")
FLEETS = ("--modes", "kv", "--layouts", "1a,1p1d", "--concurrency", "1,2", "--worker-set", "engine.speed=50", *SMALL)
FIRST, SECOND, *LAST = (
    f"kv-{layout}-isl64-osl4-share0.5-c{users}.json" for layout in ("1a", "1p1d") for users in (1, 2)
)


def written(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix == ".json"}


def run_of(content: bytes) -> Any:
    return json.loads(content)


@pytest.mark.timeout(240)
def test_a_sweep_that_is_killed_and_interrupted_goes_on_with_the_runs_that_are_left(tmp_path: Path) -> None:
    sweep = ("router", "bench", "sweep", "--out", str(tmp_path), *FLEETS)
    with started(*sweep) as killed:
        killed.line_with("4 runs, of which 0 are there already")
        killed.line_with("1/4 ")
        children = killed.until_children("-m router --mode")
        killed.process.kill()
        assert killed.ended() == -signal.SIGKILL
        _, still_there = psutil.wait_procs(children, timeout=END_S)
        assert not alive(still_there)
    first = written(tmp_path)
    assert set(first) == {FIRST}
    with started(*sweep) as interrupted:
        interrupted.line_with("4 runs, of which 1 are there already; 3 left, about ")
        interrupted.line_with("2/4 ")
        interrupted.signal(signal.SIGINT)
        assert interrupted.ended() == 1
        assert "interrupted; the same command goes on with the runs that are left" in interrupted.output
        assert "Traceback" not in interrupted.output
    second = written(tmp_path)
    assert set(second) == {FIRST, SECOND}
    with started(*sweep) as completed:
        assert completed.ended() == 0, completed.output
        assert "4/4 kv-1p1d" in completed.output
    third = written(tmp_path)
    assert set(third) == {FIRST, SECOND, *LAST}
    assert {name: third[name] for name in second} == second
    for each in map(run_of, third.values()):
        assert (each["figures"]["requests"], each["figures"]["failed"]) == (8, 0)
        assert (each["figures"]["isl_tokens"], each["figures"]["osl_tokens"]) == (64, 4)
        assert '"version"' in each["versions"]["endpoint"]
    assert run_of(third[LAST[0]])["inputs"]["workers"] == 2
