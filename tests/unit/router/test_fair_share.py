"""Deficit round robin: shares by weight, and whose turn it is."""

from collections import Counter, deque

import pytest

from router.queue.waiting import FairShare


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
