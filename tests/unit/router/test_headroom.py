"""Room in the fleet, and deficit round robin: shares by weight, and whose turn it is."""

from collections import Counter, deque
from typing import Any

import pytest

from router.decision.eligibility import BATCHED_TOKENS_DEFAULT, Headroom
from router.queue.waiting import FairShare
from tests.unit.router.samples import registered, route, row, view


class Backlog:
    """Keys with costs that wait, all of which may go."""

    def __init__(self, shares: FairShare, costs: dict[str, list[int]]) -> None:
        self.shares, self.costs = shares, {key: deque(each) for key, each in costs.items()}
        self.held_back: set[str] = set()
        for key in costs:
            shares.waits(key)

    def cost(self, key: str) -> int | None:
        return None if key in self.held_back else self.costs[key][0]

    def serve(self) -> tuple[str, int] | None:
        key = self.shares.take_turn(self.cost)
        if key is None:
            return None
        served = self.costs[key].popleft()
        if not self.costs[key]:
            self.shares.waits_no_more(key)
        return key, served

    def serve_all(self) -> str:
        return "".join(each[0] for each in iter(self.serve, None))


def limits(quantum_tokens: int = 10, **weights: float) -> FairShare:
    return FairShare(quantum_tokens, weights)


def test_a_key_that_comes_anew_waits_for_its_turn_and_brings_nothing_along() -> None:
    shares = limits(10)
    backlog = Backlog(shares, {"a": [10, 10], "b": [10]})
    assert backlog.serve() == ("a", 10)
    assert backlog.serve() == ("b", 10)
    backlog.costs["b"].append(10)
    shares.waits("b")
    assert backlog.serve_all() == "ab"


def test_a_key_whose_head_may_not_go_is_passed_over_and_saves_nothing_up() -> None:
    backlog = Backlog(limits(10), {"a": [10] * 50, "b": [10] * 50})
    backlog.held_back.add("b")
    assert [backlog.serve() for _ in range(20)] == [("a", 10)] * 20
    backlog.held_back.clear()
    served = [each[0] for each in (backlog.serve() for _ in range(10)) if each is not None]
    assert Counter(served) == {"a": 5, "b": 5}


def test_without_an_admissible_head_no_key_is_charged() -> None:
    backlog = Backlog(limits(10), {"a": [5] * 2, "b": [5] * 2})
    backlog.held_back = {"a", "b"}
    assert backlog.serve() is None
    backlog.held_back.clear()
    assert backlog.serve_all() == "aabb"


def test_no_key_waits_in_an_empty_ring() -> None:
    shares = limits()
    shares.waits_no_more("unknown")
    assert (len(shares), shares.take_turn(lambda _: 1)) == (0, None)


@pytest.mark.parametrize("cost", [1, 9, 10, 11, 12345])
def test_a_head_goes_after_the_rounds_that_its_cost_takes(cost: int) -> None:
    order = Backlog(limits(10), {"b": [10] * 2000, "a": [cost, 1]}).serve_all()
    assert order.index("a") == -(-cost // 10)


def has_headroom(threshold: float, *queued: int, request: Any = None, stated: int = 1000, **first: Any) -> bool:
    rows = [
        row(f"w{place}", prefill_tokens_queued=tokens, **(first if not place else {}))
        for place, tokens in enumerate(queued)
    ]
    told = tuple(registered(f"w{place}", max_num_batched_tokens=stated) for place in range(len(queued)))
    moment = view(*rows)._replace(registrations=told)
    return Headroom(threshold).spare_tokens(moment, moment.queued_tokens, request or route()) >= 0


@pytest.mark.parametrize(
    ("threshold", "queued", "changed", "expected"),
    [
        (0.5, (500,), {}, True),
        (0.5, (501,), {}, False),
        (0.5, (501, 500), {}, True),
        (0.5, (501, 9999), {}, False),
        (0.5, (), {}, True),
        (0.0, (1, 0), {}, True),
        (0.0, (1, 1), {}, False),
        (1.0, (BATCHED_TOKENS_DEFAULT,), {"stated": 0}, True),
        (1.0, (BATCHED_TOKENS_DEFAULT + 1,), {"stated": 0}, False),
        (0.5, (0, 9999), {"unfit": "draining"}, False),
        (0.5, (0, 9999), {"request": route(pinned_worker="w1")}, False),
        (0.5, (0, 9999), {"request": route(pinned_worker="w0")}, True),
        (0.5, (9999,), {"request": route(pinned_worker="gone")}, True),
    ],
)
def test_there_is_room_while_a_rank_that_may_take_the_request_is_at_its_threshold_or_below(
    threshold: float, queued: tuple[int, ...], changed: dict[str, Any], *, expected: bool
) -> None:
    assert has_headroom(threshold, *queued, **changed) is expected


def test_another_fleet_is_looked_at_anew() -> None:
    headroom = Headroom(1.0)
    small = view(row(prefill_tokens_queued=150))._replace(registrations=(registered(max_num_batched_tokens=100),))
    large = view(row(prefill_tokens_queued=150))._replace(registrations=(registered(max_num_batched_tokens=200),))
    found = [headroom.spare_tokens(each, each.queued_tokens, route()) for each in (small, large, small)]
    assert found == [-1.0, 50.0, -1.0]


def test_what_is_spare_is_what_is_missing_to_the_thresholds_of_those_that_may_take_it() -> None:
    moment = view(*(row(f"w{place}", prefill_tokens_queued=tokens) for place, tokens in enumerate((90, 130, 40))))
    moment = moment._replace(
        registrations=tuple(registered(f"w{place}", max_num_batched_tokens=100) for place in range(3))
    )
    found = [
        Headroom(1.0).spare_tokens(moment, moment.queued_tokens, route(pinned_worker=pin))
        for pin in (None, "w0", "w1", "x")
    ]
    assert found == [70.0, 10.0, -1.0, float("inf")]
