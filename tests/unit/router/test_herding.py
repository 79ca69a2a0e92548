"""Many requests with one new prefix at one moment: together while that is cheaper, then at further ranks, each once."""

from collections import Counter
from itertools import groupby

import pytest

from kv_protocol.decided import RouteRequest
from kv_protocol.journal import LedgerApplied
from router.decision.policy import Policy
from tests.unit.router.samples import BLOCK_SIZE, chain, registered, route
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
