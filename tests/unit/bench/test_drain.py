"""Whose requests count as moved, what they found, and when a run is not as it should be."""

import pytest

from bench.drain import LEAVES, DrainLosses, Way, lost, verdicts
from bench.streaming_client import Measured

CUT_S = 10.0


def request(sent_s: float, worker: str = "w0", cached_tokens: int = 0, error: str = "") -> Measured:
    """Return a request with a prompt of 100 tokens."""
    return Measured(sent_s, worker, "d", 100, cached_tokens, 0, 0.02, 0.03, error)


def of_way(way: Way, first_hit_rate: float = 0.0, failed: int = 0) -> DrainLosses:
    """Return a run that lost so much."""
    nothing = lost(way, [], CUT_S, None, None)
    return nothing._replace(first_hit_rate=first_hit_rate, failed=failed)


def test_moved_are_the_sessions_whose_newest_request_before_was_at_the_worker_that_left() -> None:
    found = lost(
        "without",
        [
            [request(1.0, LEAVES), request(11.0, "w2", 50), request(12.0, "w2", 90)],
            [request(1.0, "w0"), request(9.0, LEAVES), request(10.0, "w0", 10)],
            [request(1.0, LEAVES), request(2.0, "w3"), request(13.0, "w3", 80)],  # it had gone elsewhere before
            [request(3.0, LEAVES)],  # it never came again
            [request(14.0, "w0", 20)],  # it began afterwards
        ],
        CUT_S,
        12.5,
        None,
    )
    assert (found.requests, found.sessions, found.moved) == (11, 5, 2)
    assert found.first_hit_rate == (50 + 10) / 200
    assert found.later_hit_rate == (50 + 90 + 10) / 300
    assert found.fleet_hit_rate == (50 + 90 + 10 + 80 + 20) / 500
    assert found.first_ttft_p50_ms == 20.0


def test_a_failed_request_counts_as_failed_and_for_nothing_else() -> None:
    found = lost(
        "killed", [[request(1.0, LEAVES), request(11.0, error="gone"), request(12.0, "w2", 60)]], CUT_S, None, None
    )
    assert (found.failed, found.moved, found.first_hit_rate, found.later_hit_rate) == (1, 1, 0.0, 0.6)


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        ([of_way("hand-over", 0.8), of_way("without", 0.4), of_way("killed", failed=3)], []),
        ([of_way("without", failed=2)], ["without: 2 requests failed"]),
        (
            [of_way("hand-over", 0.4), of_way("without", 0.4)],
            ["first requests hit 40.0% with hand-over, more than 40.0% wanted"],
        ),
    ],
)
def test_a_drain_loses_no_request_and_a_hand_over_wins_something(found: list[DrainLosses], problems: list[str]) -> None:
    assert verdicts(found) == problems
