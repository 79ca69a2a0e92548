"""`router bench placement`: its regimes, what regret is, and the command."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.placement import grid, regret
from bench.placement.grid import Place, PlacementFigures, PlacementGrid, PlacementResult, medians, run_grid
from bench.placement.policies import PLACEMENTS
from bench.placement.regimes import CACHES, LONG_TOKENS, REGIMES, Sizing, restart_s
from bench.placement.regret import REGRET_MAX, against_rivals, failed_checks, held_out, regrets, summed, surpassed
from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from bench.routing.workloads import Workload
from router.__main__ import main
from tests.support.planting import plant

MADE_UP = [name for name, regime in REGIMES.items() if not regime.needs_trace]
SMALL = Sizing(seed=3, load=1.0, scale=0.1)
FAST = ("--fast", "--jobs", "1")


def every(workload: Workload) -> list[TraceRequest]:
    """Return all requests of a workload."""
    return [*workload.requests, *(each.request for each in chain(*workload.follow_ups.values()))]


# ---------------------------------------------------------------- regimes


@pytest.mark.parametrize("name", MADE_UP)
def test_a_regime_is_the_same_for_the_same_seed_and_another_for_another(name: str) -> None:
    make = REGIMES[name].make
    assert make(SMALL) == make(SMALL)
    assert make(SMALL) != make(SMALL._replace(seed=4))


@pytest.mark.parametrize("name", MADE_UP)
def test_every_request_fits_into_the_small_cache(name: str) -> None:
    regime = REGIMES[name]
    for load in (0.5, 1.5):
        workload = regime.make(Sizing(1, load))
        blocks = regime.fleet(CACHES[0], workload).kv_tokens // TRACE_BLOCK_TOKENS
        assert max(-(-(each.isl_tokens + each.osl_tokens) // TRACE_BLOCK_TOKENS) for each in every(workload)) <= blocks


@pytest.mark.parametrize("name", MADE_UP)
def test_a_regime_has_hundreds_of_requests(name: str) -> None:
    assert 400 <= REGIMES[name].make(Sizing(1, 1.0)).size <= 1200


def test_in_nothing_shared_no_block_comes_twice() -> None:
    ids = [each for request in every(REGIMES["nothing shared"].make(SMALL)) for each in request.block_ids]
    assert len(ids) == len(set(ids))


def test_tool_calls_have_the_context_of_the_turn_that_they_follow() -> None:
    workload = REGIMES["agents"].make(SMALL)
    parallel = [after for after in workload.follow_ups.values() if len(after) > 1]
    assert parallel
    for asked, after in workload.follow_ups.items():
        assert all(call.request.block_ids[: len(asked) - 1] == asked[:-1] for call in after if len(after) > 1)


def test_one_long_prompt_comes_first_and_600_short_ones_in_half_a_minute() -> None:
    long, *short = REGIMES["one long prompt"].make(Sizing(1, 1.0)).requests
    assert (long.isl_tokens, long.arrival_s, len(short)) == (LONG_TOKENS, 0.0, 600)
    assert 25.0 < short[-1].arrival_s - short[0].arrival_s < 36.0
    assert not {*long.block_ids} & {each for request in short for each in request.block_ids}


def test_after_the_restart_480_requests_come() -> None:
    workload = REGIMES["restart"].make(Sizing(1, 1.0))
    assert sum(each.arrival_s >= restart_s(workload) for each in workload.requests) == 480
    assert [each.arrival_s for each in workload.requests] == sorted(each.arrival_s for each in workload.requests)


# ---------------------------------------------------------------- regret

HERE, THERE = Place("chat", 1.0, "small"), Place("agents", 1.0, "small")


def found(ttft_p50_s: float, rate: float = 10.0, checked: float | None = None) -> PlacementFigures:
    return PlacementFigures(100, 0.5, ttft_p50_s, 1.0, rate, rate, checked)


def test_regret_is_the_distance_from_the_best_of_the_place() -> None:
    at = regrets({"a": found(0.1, 10.0), "b": found(0.15, 8.0)})
    assert at["a"] == dict.fromkeys(regret.COMPARED, 0.0)
    assert at["b"] == pytest.approx({"ttft_p50_s": 0.5, "ttft_p99_s": 0.0, "requests_per_s": 0.25, "goodput_rps": 0.25})


def test_regret_has_a_bound_also_where_nothing_met_its_targets() -> None:
    at = regrets({"a": found(0.1), "b": found(9.0, 0.0), "c": found(0.1, 10.0)})
    assert at["b"] == {
        "ttft_p50_s": REGRET_MAX, "ttft_p99_s": 0.0, "requests_per_s": REGRET_MAX, "goodput_rps": REGRET_MAX
    }  # fmt: skip


def test_policies_come_by_their_mean_with_their_worst_place() -> None:
    there = HERE._replace(load=1.5)
    result: PlacementResult = {
        HERE: {"a": found(0.2), "b": found(0.1)},
        there: {"a": found(0.1), "b": found(0.4)},
    }
    first, second = summed(result, result)
    assert (first.policy, first.by_figure["ttft_p50_s"], first.worst, first.worst_place) == ("a", 0.5, 1.0, str(HERE))
    assert (second.policy, second.mean, second.worst_place) == ("b", 3.0 / 2 / 4, str(there))


@pytest.mark.planted
def test_a_mean_that_takes_the_worst_for_the_best_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(regret, "LATENCIES", regret.RATES, monkeypatch)
    with pytest.raises(AssertionError):
        test_regret_is_the_distance_from_the_best_of_the_place()


def test_a_third_of_the_places_is_held_out_by_the_seed() -> None:
    places = list(PlacementGrid(regimes=("chat", "agents")).places())
    kept, drawn = held_out(places, 5)
    assert (len(places), len(drawn)) == (12, 4)
    assert sorted(kept + drawn) == sorted(places)
    assert held_out(places, 5) == (kept, drawn)
    assert held_out(places, 6) != (kept, drawn)


@pytest.mark.parametrize(("share", "fails"), [(0.0, True), (0.01, False), (0.99, False), (1.0, True), (None, False)])
def test_a_check_fails_where_a_worker_gets_nothing_or_all(share: float | None, fails: bool) -> None:
    assert bool(failed_checks({HERE: {"a": found(0.1, checked=share)}})) is fails


def test_of_several_runs_the_medians_count_and_the_share_that_is_nearest_to_failing() -> None:
    runs = [found(0.3, 9.0, 0.5), found(0.1, 10.0, 0.98), found(0.2, 30.0, 0.4)]
    assert PlacementFigures.of_runs(runs) == found(0.2, 10.0, 0.98)
    assert PlacementFigures.of_runs([found(0.1)]) == found(0.1)


def test_a_policy_is_surpassed_by_one_other_that_is_better_in_every_run() -> None:
    two_lucky_ones = {"a": [found(0.2), found(0.2)], "b": [found(0.1), found(0.2)], "c": [found(0.2), found(0.1)]}
    one_better = {"a": [found(0.2), found(0.2)], "b": [found(0.18), found(0.1)], "c": [found(0.195), found(0.195)]}
    worse_rates = {"a": [found(0.1, 9.0), found(0.1, 8.0)], "b": [found(0.1), found(0.1)]}
    assert not any(surpassed({HERE: two_lucky_ones})["a"].values())
    at = surpassed({HERE: one_better})
    assert (at["a"]["ttft_p50_s"], at["b"]["ttft_p50_s"], at["c"]["ttft_p50_s"]) == ([HERE], [], [HERE])
    at = surpassed({HERE: worse_rates})
    assert (at["a"]["requests_per_s"], at["b"]["requests_per_s"], at["a"]["ttft_p50_s"]) == ([HERE], [], [])


@pytest.mark.planted
def test_a_policy_that_is_surpassed_by_luck_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(regret, "SURPASSED_BY", -1.0, monkeypatch)
    with pytest.raises(AssertionError):
        test_a_policy_is_surpassed_by_one_other_that_is_better_in_every_run()


def test_a_rival_is_chosen_by_the_other_runs_of_the_place() -> None:
    lucky_once = {"a": [found(0.2), found(0.2), found(0.2)], "b": [found(0.1), found(0.4), found(0.4)]}
    always_better = {"a": [found(0.2), found(0.2), found(0.2)], "b": [found(0.1), found(0.16), found(0.1)]}
    by_policy = {each.policy: each for each in against_rivals({HERE: lucky_once, THERE: always_better})}
    behind_the_better_one = (1.0 + 0.25 + 1.0) / 3
    assert by_policy["a"].by_figure["ttft_p50_s"] == pytest.approx((0.0 + behind_the_better_one) / 2)
    assert by_policy["a"].worst == pytest.approx(behind_the_better_one)
    assert (by_policy["a"].worst_figure, by_policy["a"].worst_place) == ("ttft_p50_s", str(THERE))
    assert by_policy["b"].by_figure["ttft_p50_s"] == pytest.approx(((-0.5 + 1.0 + 1.0) / 3 + 0.0) / 2)


# ---------------------------------------------------------------- the command


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "placement", *arguments])


@pytest.mark.parametrize("regime", MADE_UP)
def test_every_policy_serves_all_requests_of_every_regime(regime: str) -> None:
    played = PlacementGrid((regime,), loads=(1.0,), caches=("small",), scale=0.05)
    (at,) = medians(run_grid(played, jobs=1)).values()
    assert set(at) == set(PLACEMENTS)
    assert {each.requests for each in at.values()} == {REGIMES[regime].make(Sizing(1, 1.0, 0.05)).size}


def test_the_same_grid_gives_the_same_figures(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    only = ("--regimes", "chat,windows", "--policies", "kv,sglang,llm-d", "--held-out", "2")
    printed = [typed(*FAST, *only, "--json", str(file)) for file in files]
    assert printed[0].exit_code == 0, printed[0].output
    assert printed[0].stdout == printed[1].stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    written = json.loads(files[0].read_bytes())
    assert len(written["cells"]) == 2 * 3 * 2 * 3
    assert [each["title"] for each in written["summaries"]] == ["kept", "held out"]
    assert all(0.0 <= figure <= REGRET_MAX for cell in written["cells"] for figure in cell["regret"].values())
    assert all(len(cell["runs"]) == 1 for cell in written["cells"])
    assert "| kv |" in printed[0].stdout


def test_each_run_of_a_place_has_a_seed_of_its_own() -> None:
    played = PlacementGrid(("chat",), ("kv",), (1.0,), ("small",), scale=0.05)
    (both,), (first,), (second,) = (run_grid(each, jobs=1).values() for each in (
        played._replace(runs=2), played, played._replace(seed=2)
    ))  # fmt: skip
    assert both["kv"] == [*first["kv"], *second["kv"]]
    assert first != second


def test_runs_are_in_the_order_of_their_seeds_whichever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(play: Any, cells: Any, _jobs: int) -> Any:
        return ((cell, play(cell)) for cell in reversed(cells))

    two = PlacementGrid(("chat",), ("kv", "round-robin"), (1.0,), ("small",), scale=0.05, runs=2)
    in_order = run_grid(two, jobs=1)
    monkeypatch.setattr(grid, "play_side_by_side", last_first)
    assert run_grid(two, jobs=2) == in_order


def test_without_the_trace_its_regime_is_left_out() -> None:
    assert "left out without --trace: mooncake" in typed(*FAST, "--regimes", "mooncake,chat", "--policies", "kv").stdout
    alone = typed(*FAST, "--regimes", "mooncake")
    assert (alone.exit_code, "needs --trace" in alone.stderr) == (2, True)


@pytest.mark.parametrize(("flag", "value"), [("--regimes", "chats"), ("--policies", "kv,best")])
def test_a_name_that_does_not_exist_is_refused(flag: str, value: str) -> None:
    refused = typed(*FAST, flag, value)
    assert (refused.exit_code, f"found '{value.rsplit(',', maxsplit=1)[-1]}', allowed" in refused.stderr) == (2, True)


def test_caches_that_follow_sessions_have_more_hits_than_turns() -> None:
    played = PlacementGrid(("chat",), ("kv", "sglang", "session-hash", "round-robin"), (1.0,), ("large",), scale=0.2)
    (at,) = medians(run_grid(played, jobs=1)).values()
    in_turn = at["round-robin"].hit_rate
    assert all(at[name].hit_rate > in_turn + 0.05 for name in ("kv", "sglang", "session-hash")), at
