"""`router bench placement`: its regimes, what regret is, the command, and mode kv by default in two of them."""

import json
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.placement.command import (
    COMPARED,
    REGRET_MAX,
    Cell,
    Place,
    PlacementFigures,
    PlacementGrid,
    PlacementResult,
    beside_the_best_of_others,
    clear_losses,
    failed_checks,
    held_out,
    medians,
    play,
    regrets,
    run_grid,
    summed,
)
from bench.placement.policies import PLACEMENTS
from bench.placement.regimes import CACHES, LOADS, REGIMES, Sizing
from bench.routing.trace import TraceRequest
from bench.routing.workloads import Workload
from router.__main__ import main

GRID = PlacementGrid()


def share(regime: str, load: float, cache: str) -> float:
    """Return the share that the regime checks."""
    checked = play(GRID, Cell(Place(regime, load, cache), "kv", GRID.seed)).checked
    assert checked is not None
    return checked


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("load", LOADS)
def test_a_rank_that_computed_one_long_prompt_gets_its_part_of_the_600_short_ones_that_follow(
    load: float, cache: str
) -> None:
    even = 1 / REGIMES["one long prompt"].workers
    assert even / 2 < share("one long prompt", load, cache) < even * 1.5


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("load", LOADS)
def test_after_a_restart_no_rank_gets_all_of_the_next_480_requests(load: float, cache: str) -> None:
    assert 0.0 < share("restart", load, cache) < 1.0


MADE_UP = [name for name, regime in REGIMES.items() if not regime.needs_trace]
FAST = ("--fast", "--jobs", "1")


def every(workload: Workload) -> list[TraceRequest]:
    """Return all requests of a workload."""
    return [*workload.requests, *(each.request for each in chain(*workload.follow_ups.values()))]


# ---------------------------------------------------------------- regret

HERE = Place("chat", 1.0, "small")


def found(ttft_p50_s: float, rate: float = 10.0, checked: float | None = None) -> PlacementFigures:
    return PlacementFigures(100, 0.5, ttft_p50_s, 1.0, rate, rate, checked)


def test_regret_is_the_distance_from_the_best_of_the_place() -> None:
    at = regrets({"a": found(0.1, 10.0), "b": found(0.15, 8.0)})
    assert at["a"] == dict.fromkeys(COMPARED, 0.0)
    assert at["b"] == pytest.approx({"ttft_p50_s": 0.5, "ttft_p99_s": 0.0, "requests_per_s": 0.25, "goodput_rps": 0.25})


def test_policies_come_by_their_mean_with_their_worst_place() -> None:
    there = HERE._replace(load=1.5)
    result: PlacementResult = {HERE: {"a": found(0.2), "b": found(0.1)}, there: {"a": found(0.1), "b": found(0.4)}}
    first, second = summed(result, result)
    assert (first.policy, first.by_figure["ttft_p50_s"], first.worst, first.worst_place) == ("a", 0.5, 1.0, str(HERE))
    assert (second.policy, second.mean, second.worst_place) == ("b", 3.0 / 2 / 4, str(there))


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


def test_the_best_of_the_other_runs_has_no_luck() -> None:
    """In each run another of `b` and `c` is the luckiest; none of them is better than `a` in the mean of the others."""
    runs = {HERE: {"a": [found(0.2)] * 3, "b": [found(0.1), found(0.3), found(0.3)], "c": [found(0.3)] * 3}}
    by_median = summed(medians(runs), [HERE])
    assert {each.policy: each.by_figure["ttft_p50_s"] for each in by_median} == pytest.approx(
        {"a": 0.0, "b": 0.5, "c": 0.5}
    )
    beside = beside_the_best_of_others(runs, [HERE])
    assert beside["a"]["ttft_p50_s"] == pytest.approx((0.0 + 0.0 + 0.0) / 3)
    assert beside["b"]["ttft_p50_s"] == pytest.approx((-0.5 + 0.5 + 0.5) / 3)


def test_a_policy_clearly_loses_where_another_is_better_in_every_run() -> None:
    ours, once, always = [found(0.2)] * 3, [found(0.1), found(0.1), found(0.2)], [found(0.1), found(0.15), found(0.19)]
    assert clear_losses({HERE: {"kv": ours, "once": once}}, "kv") == []
    (lost,) = clear_losses({HERE: {"kv": ours, "once": once, "always": always}}, "kv")
    assert (lost.place, lost.figure, lost.winner) == (HERE, "ttft_p50_s", "always")
    assert lost.regret == pytest.approx(1 / 3)


# ---------------------------------------------------------------- the command


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "placement", *arguments])


@pytest.mark.parametrize("regime", MADE_UP)
def test_every_policy_serves_all_requests_of_every_regime(regime: str) -> None:
    played = PlacementGrid((regime,), loads=(1.0,), caches=("small",), scale=0.05)
    (at,) = medians(run_grid(played, jobs=1)).values()
    assert set(at) == set(PLACEMENTS)
    assert {each.requests for each in at.values()} == {len(every(REGIMES[regime].make(Sizing(1, 1.0, 0.05))))}


def test_the_same_grid_gives_the_same_figures(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    only = ("--regimes", "chat,agents", "--policies", "kv,sglang,llm-d", "--held-out", "2")
    printed = [typed(*FAST, *only, "--json", str(file)) for file in files]
    assert printed[0].exit_code == 0, printed[0].output
    assert printed[0].stdout == printed[1].stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    written = json.loads(files[0].read_bytes())
    assert len(written["cells"]) == 2 * 3 * 2 * 3
    assert all(0.0 <= figure <= REGRET_MAX for cell in written["cells"] for figure in cell["regret"].values())
    assert "mean regret, no queue, held out" in printed[0].stdout


def test_caches_that_follow_sessions_have_more_hits_than_turns() -> None:
    played = PlacementGrid(("chat",), ("kv", "sglang", "session-hash", "round-robin"), (1.0,), ("large",), scale=0.2)
    (at,) = medians(run_grid(played, jobs=1)).values()
    in_turn = at["round-robin"].hit_rate
    assert all(at[name].hit_rate > in_turn + 0.05 for name in ("kv", "sglang", "session-hash")), at
