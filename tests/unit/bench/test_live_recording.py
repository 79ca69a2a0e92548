"""Live recordings of the kit's form, with rows that need no engine."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench.fidelity.live_command import KINDS, LiveFigures, live, order, within
from bench.fidelity.live_recording import (
    SESSIONS,
    TURNS,
    WORKERS,
    LiveFleet,
    drawn_sessions,
    live_workload,
    load_runs,
)
from bench.placement.policies import Placement
from router.decision.policies import Choice, Mode
from router.decision.policy import Policy
from tests.support.paths import CAPTURES

SYSTEM_TOKENS = 640
CAPTURE = CAPTURES / "h200_live_policies.json"
REAL = LiveFigures(30.0, 0.8, *[1.0] * 5)


def rows(**changed: Any) -> list[list[Any]]:
    """A row of each request: prompts grow by 300 tokens a turn, and first turns find the system prompt cached."""
    columns = {"isl": None, "cached": SYSTEM_TOKENS, "ttft_s": 0.1, "e2e_s": 1.0, "overlap": "0"} | changed
    return [
        [
            columns["isl"] or SYSTEM_TOKENS + 300 * (turn + 1),
            columns["cached"],
            columns["ttft_s"],
            columns["e2e_s"],
            f"w{session % WORKERS}",
            turn,
            columns["overlap"],
            session,
        ]
        for session in range(SESSIONS)
        for turn in range(TURNS)
    ]


def written(path: Path, data: Any) -> Path:
    (path / "live.json").write_bytes(msgspec.json.encode(data))
    return path / "live.json"


def run(policy: str = "rr", **changed: Any) -> dict[str, Any]:
    latencies = {"ttft_ms": {"50": 100.0, "90": 200.0, "99": 300.0}, "e2e_ms": {"50": 1000.0, "99": 2000.0}}
    return {"policy": policy, "req_s": 20.0, "hit": 0.5, **latencies, "rows": rows(**changed)}


def test_a_workload_has_the_rows_lengths_and_the_drawn_answers(tmp_path: Path) -> None:
    workload = live_workload(load_runs(written(tmp_path, [run()]), 9), 9, 45.0)
    assert sum(len(session.added_tokens) for session in workload.sessions) == SESSIONS * TURNS
    assert workload.system_tokens == (SYSTEM_TOKENS,) * 4
    assert {session.added_tokens for session in workload.sessions} == {(300,) * TURNS}
    assert workload.sessions[0].output_tokens == drawn_sessions()[0].answers_tokens
    assert workload.blocks_per_worker == 9


def test_the_length_of_a_turn_that_no_run_came_to_follows_from_its_words(tmp_path: Path) -> None:
    runs = load_runs(written(tmp_path, [run() | {"rows": rows()[:-1]}]), 9)
    *known, unknown = live_workload(runs, 9, 45.0).sessions[-1].added_tokens
    words, mean_words = drawn_sessions()[-1].words[-1] + 40, 350 + 40
    assert known == [300] * (TURNS - 1)
    assert unknown == pytest.approx(300 * words / mean_words, rel=0.05)


def test_runs_of_one_list_are_told_apart_by_their_blocks_and_may_be_without_rows(tmp_path: Path) -> None:
    runs = [run("a") | {"blocks_per_engine": 9}, run("b") | {"blocks_per_engine": 8, "rows": []}]
    (found,) = load_runs(written(tmp_path, {"runs": runs}), 8)
    assert (found.policy, LiveFigures.recorded(found)) == ("b", LiveFigures(20.0, 0.5, 0.1, 0.2, 0.3, 1.0, 2.0))


@pytest.mark.parametrize(
    ("figure", "inside", "outside"),
    [("hit_ratio", 0.819, 0.821), ("requests_per_s", 37.4, 37.6), ("ttft_p99_s", 0.76, 0.74)],
)
def test_figures_have_their_bounds(figure: str, inside: float, outside: float) -> None:
    found = [within(REAL, REAL._replace(**{figure: value})) for value in (inside, outside)]
    assert [sum(each) for each in found] == [7, 6]


def test_only_policies_that_are_apart_count_in_the_order() -> None:
    real = {name: REAL._replace(requests_per_s=value) for name, value in (("a", 30.0), ("b", 29.5), ("c", 20.0))}
    turned = {"a": real["b"], "b": real["a"], "c": real["c"]}
    assert order(real, turned) == (("a", "b", "c"), ("b", "a", "c"), 2, 2)
    assert order(real, {"a": real["c"], "b": real["b"], "c": real["a"]})[2:] == (0, 2)


def test_the_command_plays_each_policy_once_and_says_which_it_does_not_know(tmp_path: Path) -> None:
    path = written(tmp_path, [run("kv"), run("kv"), run("unknown")])
    found = CliRunner().invoke(live, ["--runs", str(path), "3072", "--seeds", "1"])
    assert found.exit_code == 0, found.output
    lines = [line.split(" | ") for line in found.output.splitlines() if line.startswith("| ")]
    assert [cells[0] for cells in lines] == ["| policy", "| kv", "| unknown"]
    assert lines[2][1] == "not simulated"
    assert "of 7 figures within their bounds" in found.output


FIRST_WORKER = Placement(
    Policy(mode="first", newcomers=False, predict_on_route=False),
    lambda _: {"first": Mode(lambda *_: Choice(0, "load"))},
)
"""All sessions on one worker, as sglang-router settled on in this recording."""


@pytest.mark.skipif(not CAPTURE.exists(), reason=f"no {CAPTURE}")
def test_one_engine_that_gets_all_requests_is_simulated_within_the_bounds() -> None:
    runs = load_runs(CAPTURE, 1536)
    saturated = next(each for each in runs if each.policy.startswith("sglang"))
    model, sending_s = KINDS["vllm"]
    workload = live_workload(runs, 1536, sending_s)
    simulated = LiveFigures.of(LiveFleet(workload, model, FIRST_WORKER, seed=0).run())
    assert within(LiveFigures.recorded(saturated), simulated) == [True] * 7
