"""Room in the fleet: some rank that may take the request is at its threshold or below."""

from typing import Any

import pytest

from router.decision.eligibility import BATCHED_TOKENS_DEFAULT, is_below
from tests.unit.router.samples import registered, route, row, view


def has_headroom(threshold: float, *queued: int, request: Any = None, stated: int = 1000, **first: Any) -> bool:
    rows = [
        row(f"w{place}", prefill_tokens_queued=tokens, **(first if not place else {}))
        for place, tokens in enumerate(queued)
    ]
    told = tuple(registered(f"w{place}", max_num_batched_tokens=stated) for place in range(len(queued)))
    moment = view(*rows)._replace(registrations=told)
    return is_below(threshold, moment, moment.queued_tokens.tolist(), request or route())


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
