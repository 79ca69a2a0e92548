"""What the costs leave open, the seed decides; of many requests with one new prefix at one moment, too."""

import math
from collections import Counter
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.decided import RouteRequest
from kv_protocol.journal import LedgerApplied
from kv_protocol.splitmix import splitmix64
from router.decision.policy import Policy
from tests.support.amount import examples
from tests.support.decide import decide
from tests.unit.router.samples import BLOCK_SIZE, chain, registered, route, row, view
from tests.unit.router.test_routing import Bench

RANKS = 8
KV = Policy(mode="kv")
OWN_BLOCKS = 4


def fleet() -> Bench:
    """Return idle ranks, which hold nothing."""
    return Bench(*[registered(f"w{number}") for number in range(RANKS)], policy=KV)


def request(number: int, shared_blocks: int) -> RouteRequest:
    own = range(1_000_000 + number * OWN_BLOCKS, 1_000_000 + (number + 1) * OWN_BLOCKS)
    hashes = chain(*range(1, shared_blocks + 1), *own)
    tokens = (shared_blocks + OWN_BLOCKS) * BLOCK_SIZE
    return route(tokens, decision_id=f"d{number}", sequence_hashes=hashes, max_tokens=200)


def placed(bench: Bench, shared_blocks: int, requests: int) -> list[str]:
    """Return the workers of these requests, none of which has begun."""
    workers = []
    for number in range(requests):
        verdict = bench.routing.decide(request(number, shared_blocks))
        bench.routing.take(verdict)
        workers.append(verdict.winner.worker_id)
    return workers


def test_a_prefix_of_32_000_tokens_is_computed_by_some_ranks_only() -> None:
    workers = placed(fleet(), shared_blocks=2000, requests=64)
    assert len(set(workers)) < RANKS
    assert max(Counter(workers).values()) < 32


@pytest.mark.parametrize("shared_blocks", [500, 2000])
def test_a_rank_gets_the_prefix_once_and_requests_for_it_at_once(shared_blocks: int) -> None:
    workers = placed(fleet(), shared_blocks, requests=16)
    turns = [(worker, len(list(together))) for worker, together in groupby(workers)]
    assert len(turns) == len(set(workers))
    assert all(requests > 1 for _, requests in turns[:-1])


@pytest.mark.parametrize("shared_blocks", [0, 4])
def test_a_short_prefix_is_not_worth_a_queue(shared_blocks: int) -> None:
    workers = placed(fleet(), shared_blocks, requests=RANKS)
    assert len(set(workers)) == RANKS


def test_in_the_end_the_load_is_even() -> None:
    counted = Counter(placed(fleet(), shared_blocks=500, requests=25 * RANKS))
    assert sorted(counted.values()) == [25] * RANKS


def test_what_another_router_promised_counts_as_ones_own() -> None:
    alone, sharing = fleet(), fleet()
    first = placed(alone, shared_blocks=500, requests=10)
    for taken in (lease.verdict for lease in reversed(alone.routing.decisions.newest(10))):
        sharing.routing.apply(LedgerApplied(now_s=taken.now_s, event=taken.promise, router="another"))
    chosen = [bench.routing.decide(request(10, 500)).winner.worker_id for bench in (alone, sharing, fleet())]
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] not in first[:9]


SEEDS = examples(6000)


class Chosen(NamedTuple):
    """The winner and the next best, by their indices among the costs, and how much more the next best costs."""

    winner: int
    runner_up: int | None
    margin: float | None
    costs: list[float]


def costing(costs: list[float]) -> Any:
    """Return decode workers of which each costs so many times as much as the reference engine."""
    return view(*(row(f"w{at}/0", role="decode", factors=(1.0, cost)) for at, cost in enumerate(costs)))


def choose(moment: Any, temperature: float, seed: int) -> Chosen:
    verdict = decide(moment, route(phase="decode"), Policy(temperature=temperature), seed)
    return Chosen(verdict.winner_at, verdict.runner_up, verdict.margin, verdict.cost_list())


def shares(costs: list[float], temperature: float, first_seed: int = 0) -> list[float]:
    """Return how often each is chosen over many seeds, made as a router makes them."""
    moment = costing(costs)
    winners = Counter(choose(moment, temperature, splitmix64(first_seed + number)).winner for number in range(SEEDS))
    return [winners[index] / SEEDS for index in range(len(costs))]


def close(found: list[float], expected: list[float]) -> bool:
    """Return whether each share is within five standard deviations of what is expected."""
    return all(
        abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / SEEDS) + 1e-12
        for share, chance in zip(found, expected, strict=True)
    )


def softmax(costs: list[float], temperature: float) -> list[float]:
    span = max(costs) - min(costs)
    weights = [math.exp(-(cost - min(costs)) / span / temperature) for cost in costs]
    return [weight / sum(weights) for weight in weights]


def test_only_exact_ties_are_drawn_and_uniformly() -> None:
    found = shares([1.0, 7.0, 1.0, 1.0 + 1e-12, 1.0], 0.0)
    assert close(found, [1 / 3, 0, 1 / 3, 0, 1 / 3]), found


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_ties_of_all_are_uniform(count: int) -> None:
    found = shares([4.0] * count, 0.0)
    assert close(found, [1 / count] * count), found


def test_ties_are_uniform_over_seeds_that_follow_one_another_too() -> None:
    moment = costing([1.0, 1.0])
    winners = Counter(choose(moment, 0.0, seed).winner for seed in range(SEEDS))
    assert close([winners[0] / SEEDS, winners[1] / SEEDS], [0.5, 0.5]), winners


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 10.0])
def test_with_temperature_the_shares_are_the_softmax_of_the_scaled_costs(temperature: float) -> None:
    costs = [12.0, 3.0, 5.0, 30.0, 3.5]
    found = shares(costs, temperature)
    assert close(found, softmax(costs, temperature)), found


@pytest.mark.parametrize(("factor", "offset"), [(1000.0, 0.0), (1.0, 5000.0)])
def test_the_scale_of_the_costs_has_no_say(factor: float, offset: float) -> None:
    costs = [12.0, 3.0, 5.0, 30.0]
    moments = costing(costs), costing([factor * cost + offset for cost in costs])
    for seed in range(SEEDS // 3):
        plain, scaled = (choose(moment, 0.4, splitmix64(seed)).winner for moment in moments)
        assert plain == scaled


def test_the_margin_is_negative_where_the_draw_passed_the_cheapest_over() -> None:
    moment = costing([1.0, 4.0, 9.0])
    passed_over = [chosen for seed in range(200) if (chosen := choose(moment, 5.0, splitmix64(seed))).winner != 0]
    assert passed_over
    assert all(chosen.runner_up == 0 for chosen in passed_over)
    margins = {chosen.margin / chosen.costs[0] for chosen in passed_over if chosen.margin is not None}
    assert sorted(margins) == pytest.approx([-8.0, -3.0])


factors = st.lists(st.floats(0, 1e12), min_size=1, max_size=8)
seeds = st.integers(0, 2**64 - 1)


@given(factors, st.floats(0, 100), seeds)
def test_the_same_in_is_the_same_out_and_the_choice_is_consistent(
    factors: list[float], temperature: float, seed: int
) -> None:
    chosen = choose(costing(factors), temperature, seed)
    assert chosen == choose(costing(factors), temperature, seed)
    costs = chosen.costs
    assert 0 <= chosen.winner < len(costs)
    if len(costs) == 1:
        assert (chosen.runner_up, chosen.margin) == (None, None)
        return
    assert chosen.runner_up is not None
    assert chosen.runner_up != chosen.winner
    assert costs[chosen.runner_up] == min(cost for at, cost in enumerate(costs) if at != chosen.winner)
    assert chosen.margin == costs[chosen.runner_up] - costs[chosen.winner]
    if temperature == 0:
        assert costs[chosen.winner] == min(costs)
