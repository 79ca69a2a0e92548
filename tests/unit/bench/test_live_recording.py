"""Live recordings of the kit's form, with rows that need no engine."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench.fidelity.closed_loop import ClosedLoop, EngineModel, Placer, RoundRobin, Sent, description_of
from bench.fidelity.live_command import live, placement_of, simulate
from bench.fidelity.live_figures import LiveFigures, order, within
from bench.fidelity.live_recording import (
    SESSIONS,
    TURNS,
    WORKERS,
    BySystem,
    answered,
    drawn_sessions,
    live_workload,
    load_runs,
)
from bench.fidelity.recording import RecordingInvalid
from bench.fidelity.routed import Routed
from bench.placement.policies import PLACEMENTS
from router.decision.policy import CostParameters
from tests.support.paths import CAPTURES
from tests.unit.bench.fleets import recording
from worker_agent.engines.simulated.timing import H200_8B
from worker_agent.engines.types import EngineRequest

SYSTEM_TOKENS = 640
CAPTURE = CAPTURES / "h200_live_policies.json"
REAL = LiveFigures(30.0, 0.8, *[1.0] * 7)


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
    return {"policy": policy, "req_s": 20.0, "rows": rows(**changed)}


def test_the_kits_draws_are_repeated() -> None:
    first, second, *_ = drawn_sessions()
    assert (first.system, first.answers_tokens) == (2, (64, 49, 23, 51, 41, 21))
    assert (second.system, second.answers_tokens) == (2, (63, 24, 60, 37, 45, 60))


def test_a_workload_has_the_rows_lengths_and_the_drawn_answers(tmp_path: Path) -> None:
    workload = live_workload(load_runs(written(tmp_path, [run()]), 9), 9)
    assert workload.requests == SESSIONS * TURNS
    assert workload.system_tokens == (SYSTEM_TOKENS,) * 4
    assert {session.added_tokens for session in workload.sessions} == {(300,) * TURNS}
    assert workload.sessions[0].output_tokens == drawn_sessions()[0].answers_tokens
    assert (workload.keeps_answers, workload.blocks_per_worker) == (False, 9)


def test_rows_are_read_with_the_time_between_tokens_that_their_answers_had(tmp_path: Path) -> None:
    first = next(answered(load_runs(written(tmp_path, [run()]), 9)[0]))
    assert (first.cached_tokens, first.worker, first.turn) == (SYSTEM_TOKENS, 0, 0)
    assert first.itl_s == pytest.approx(0.9 / 63)


def test_sessions_are_placed_by_their_system_prompt(tmp_path: Path) -> None:
    workload = live_workload(load_runs(written(tmp_path, [run()]), 9), 9)
    placer = BySystem((3, 2, 1, 0), workload)
    request = EngineRequest(request_id="r", prompt=(1,), max_tokens=1)
    asked = [Sent(session, 2, request, 0.0, (0,) * WORKERS) for session in range(SESSIONS)]
    assert [placer.choose(sent) for sent in asked] == [3 - session.system for session in drawn_sessions()]


def test_runs_are_found_by_their_blocks_and_former_modes_by_their_weights(tmp_path: Path) -> None:
    path = written(tmp_path, {"runs_9_blocks": [run("kv")], "runs_8_blocks": [run("rr")]})
    assert [each.policy for each in load_runs(path, 9)] == ["kv, prefill_scale 1, history_weight 0.5"]
    with pytest.raises(RecordingInvalid, match="runs with 7 blocks"):
        load_runs(path, 7)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        ("rr", "round-robin"),
        ("kvb", "kv-blocks"),
        ("sglang:cache_aware", "sglang"),
        ("sglang-router 0.3.2 cache_aware", "sglang"),
        ("predicted-ttft", "predicted-ttft"),
    ],
)
def test_policies_are_known_by_the_recordings_names(policy: str, mode: str) -> None:
    placement = placement_of(policy)
    assert placement is not None
    assert placement.policy.mode == mode


def test_weights_are_read_from_a_policys_name() -> None:
    placement = placement_of("kv, prefill_scale 16, request_weight 8")
    assert placement is not None
    assert placement.policy.parameters == CostParameters(prefill_scale=16.0, request_weight=8.0)
    assert placement_of("vllm-router, with 8 weights") is None


@pytest.mark.parametrize(
    ("figure", "inside", "outside"),
    [("hit_ratio", 0.819, 0.821), ("requests_per_s", 37.4, 37.6), ("ttft_p99_s", 0.76, 0.74)],
)
def test_figures_have_their_bounds(figure: str, inside: float, outside: float) -> None:
    found = [within(REAL, REAL._replace(**{figure: value})) for value in (inside, outside)]
    assert [sum(each) for each in found] == [9, 8]


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
    assert "of 9 figures within their bounds" in found.output


def test_runs_that_name_their_workers_are_not_placed_otherwise(tmp_path: Path) -> None:
    unnamed = run("sglang:cache_aware")
    for row in unnamed["rows"]:
        row[4] = None
    path = written(tmp_path, [run(), unnamed])
    found = CliRunner().invoke(live, ["--runs", str(path), "3072", "--by-system", "0", "1", "2", "3"])
    assert found.exit_code == 0, found.output
    lines = [line.split(" | ") for line in found.output.splitlines() if line.startswith("| ")]
    assert [cells[1] == "not simulated" for cells in lines[1:]] == [True, False]


@pytest.mark.parametrize(
    "row", [[1, 0, 0.1, 1.0, "w0", TURNS, "0", 0], [1, 0, 0.1, 1.0, "w0", 0, "0", SESSIONS], [1, 0]]
)
def test_rows_that_the_clients_cannot_have_sent_are_refused(row: list[Any], tmp_path: Path) -> None:
    with pytest.raises(RecordingInvalid, match="a live recording"):
        load_runs(written(tmp_path, [{"policy": "rr", "req_s": 1.0, "rows": [row]}]), 9)


def test_the_router_places_by_what_the_engines_hold() -> None:
    workload = recording(blocks_per_worker=1000)

    def cached(placer: Placer) -> int:
        played = ClosedLoop(workload, EngineModel(H200_8B), placer, workers=3).play()
        return sum(each.cached_tokens for each in played.answered)

    def routed(policy: str) -> Placer:
        return Routed(PLACEMENTS[policy], description_of(workload, EngineModel(H200_8B)), 3, seed=1)

    assert cached(routed("round-robin")) == cached(RoundRobin())
    assert cached(routed("kv")) > 1.1 * cached(RoundRobin())
    assert cached(routed("kv")) == cached(routed("kv"))


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(live, ["--runs", str(written(tmp_path, [])), "3072"])
    assert (found.exit_code, "allowed runs with 3072 blocks" in found.output) == (2, True)


@pytest.mark.skipif(not CAPTURE.exists(), reason=f"no {CAPTURE}")
def test_one_engine_that_gets_all_requests_is_simulated_within_the_bounds() -> None:
    runs = load_runs(CAPTURE, 1536)
    saturated = next(each for each in runs if each.policy.startswith("sglang"))
    workload = live_workload(runs, 1536)
    simulated = simulate(workload, BySystem((0, 0, 0, 0), workload))
    assert within(LiveFigures.of(list(answered(saturated)), saturated.requests_per_s), simulated) == [True] * 9
