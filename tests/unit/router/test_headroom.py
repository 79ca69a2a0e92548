"""Room in the fleet: some rank that may take the request is at its threshold or below."""

from typing import Any

import pytest

from router.decision.eligibility import BATCHED_TOKENS_DEFAULT, Headroom
from tests.unit.router.samples import registered, route, row, view


def has_headroom(threshold: float, *queued: int, request: Any = None, stated: int = 1000, **first: Any) -> bool:
    rows = [
        row(f"w{place}", prefill_tokens_queued=tokens, **(first if not place else {}))
        for place, tokens in enumerate(queued)
    ]
    told = tuple(registered(f"w{place}", max_num_batched_tokens=stated) for place in range(len(queued)))
    moment = view(*rows)._replace(registrations=told)
    return Headroom(threshold).spare_tokens(moment, moment.queued_tokens, request or route()) >= 0


@pytest.mark.parametrize(
    ("queued", "expected"), [((500,), True), ((501,), False), ((501, 500), True), ((501, 9999), False), ((), True)]
)
def test_there_is_room_while_a_rank_is_at_its_threshold_or_below(queued: tuple[int, ...], expected: bool) -> None:
    assert has_headroom(0.5, *queued) is expected


def test_a_threshold_of_0_wants_a_rank_without_any_prefill() -> None:
    assert has_headroom(0.0, 1, 0)
    assert not has_headroom(0.0, 1, 1)


def test_a_worker_that_states_no_batch_has_the_default() -> None:
    assert has_headroom(1.0, BATCHED_TOKENS_DEFAULT, stated=0)
    assert not has_headroom(1.0, BATCHED_TOKENS_DEFAULT + 1, stated=0)


def test_room_at_a_rank_that_may_not_take_the_request_is_none() -> None:
    assert not has_headroom(0.5, 0, 9999, unfit="draining")
    assert not has_headroom(0.5, 0, 9999, request=route(pinned_worker="w1"))
    assert has_headroom(0.5, 0, 9999, request=route(pinned_worker="w0"))


def test_without_an_eligible_rank_there_is_headroom() -> None:
    assert has_headroom(0.5, 9999, request=route(pinned_worker="gone"))
    assert has_headroom(0.5, 0, request=route(pinned_worker="gone"))


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
