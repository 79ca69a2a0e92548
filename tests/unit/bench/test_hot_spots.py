"""Neither one hot prompt nor sequential agents pile up at one worker; and the figures that say so."""

from bench.routing.hot_spots import HOT_PROMPT, play, spreads
from bench.routing.hot_spots_command import SPREAD_MAX, verdicts
from bench.routing.virtual_fleet import RequestFigures
from bench.routing.workloads import Agents, agents, hot_prompt

WORKERS = 8
SMALL = {
    "hot prompt": hot_prompt(HOT_PROMPT._replace(sessions=360), 1),
    "agents": agents(Agents(sessions=96, concurrent=48, turns=5), 1),
}


def test_in_mode_kv_agents_are_spread_and_more_is_found_in_caches_than_in_turn() -> None:
    workload = SMALL["agents"]
    found = {("agents", mode): play(workload, mode, workers=WORKERS, seed=1) for mode in ("kv", "round-robin")}
    assert found["agents", "kv"].spread <= SPREAD_MAX
    assert verdicts(found) == []


def test_one_hot_prompt_stays_at_few_workers() -> None:
    workload = SMALL["hot prompt"]
    kv, in_turn = (play(workload, mode, workers=WORKERS, seed=1) for mode in ("kv", "round-robin"))
    assert SPREAD_MAX < kv.spread < WORKERS
    assert kv.hit_rate > in_turn.hit_rate
    assert kv.ttft_p99_s < in_turn.ttft_p99_s


def outcome(arrival_s: float, worker: int, uncached_tokens: int) -> RequestFigures:
    return RequestFigures(arrival_s, worker, uncached_tokens, 1, 0, 0, 0.1, 0.1)


def test_the_spread_is_the_most_of_a_worker_over_the_mean_of_all_by_window() -> None:
    even = [outcome(1.0, worker, 100) for worker in range(4)]
    one = [outcome(11.0, 2, 400)]
    quiet = [outcome(21.0, 0, 50)]
    assert spreads([*even, *one, *quiet], 4) == [1.0, 4.0]
    assert spreads([], 4) == []
