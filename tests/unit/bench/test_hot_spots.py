"""Neither one hot prompt nor sequential agents pile up at one worker; and the figures that say so."""

import pytest

from bench.routing.hot_spots import (
    HOT_PROMPT,
    KV_TOKENS,
    play,
    spreads,
    workloads,
)
from bench.routing.hot_spots_command import SPREAD_MAX, verdicts
from bench.routing.virtual_fleet import RequestFigures
from bench.routing.workloads import Agents, Workload, agents, hot_prompt

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


@pytest.mark.planted
def test_a_mode_that_sticks_to_the_holder_is_found_out() -> None:
    found = {
        ("hot prompt", "kv"): play(SMALL["hot prompt"], "kv", workers=WORKERS, seed=1)._replace(spread=4.0),
        ("hot prompt", "round-robin"): play(SMALL["hot prompt"], "round-robin", workers=WORKERS, seed=1),
    }
    assert verdicts(found) == ["hot prompt: spread 4.00, at most 1.5 allowed"]


def test_an_agent_asks_on_only_when_it_was_answered() -> None:
    workload = agents(Agents(sessions=4, concurrent=2, turns=3), 7)
    assert len(workload.requests) == 2
    assert len(workload.follow_ups) == 4 * 3 - 2
    assert play(workload, "kv", workers=2, seed=1).requests == 12


def test_a_workload_is_the_same_for_the_same_seed() -> None:
    assert workloads(3) == workloads(3)
    assert workloads(3) != workloads(4)


def test_all_requests_begin_with_the_one_system_prompt() -> None:
    for workload in SMALL.values():
        requests = [
            *workload.requests,
            *(each.request for several in workload.follow_ups.values() for each in several),
        ]
        assert len({request.block_ids[:16] for request in requests}) == 1
        assert max(request.isl_tokens for request in requests) < KV_TOKENS


def outcome(arrival_s: float, worker: int, uncached_tokens: int) -> RequestFigures:
    return RequestFigures(arrival_s, worker, uncached_tokens, 1, 0, 0, 0.1, 0.1)


def test_the_spread_is_the_most_of_a_worker_over_the_mean_of_all_by_window() -> None:
    even = [outcome(1.0, worker, 100) for worker in range(4)]
    one = [outcome(11.0, 2, 400)]
    quiet = [outcome(21.0, 0, 50)]
    assert spreads([*even, *one, *quiet], 4) == [1.0, 4.0]
    assert spreads([], 4) == []


def test_a_workload_without_follow_ups_is_played_as_it_is() -> None:
    workload = hot_prompt(HOT_PROMPT._replace(sessions=5), 1)
    assert isinstance(workload, Workload)
    assert play(workload, "kv", workers=2, seed=1).requests == len(workload.requests)
