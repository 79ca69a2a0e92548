"""What a pool's router says of itself: what is read of it, and what is not what a router says."""

import pytest

from router.doctor.pages import PageUnreadable, not_ready
from router.pools.state import Attained, LiveLimits, Queue
from router.pools.watch import Busyness, busyness, not_serving

PAGE = b"""# HELP kvrouter_queued_requests Requests that wait for room in the fleet
# TYPE kvrouter_queued_requests gauge
kvrouter_queued_requests 3.0
# TYPE kvrouter_ledger_reported_waiting gauge
kvrouter_ledger_reported_waiting{dp_rank="0",worker="w0"} 4.0
kvrouter_ledger_reported_waiting{dp_rank="1",worker="w0"} 5.0
# TYPE kvrouter_time_to_first_token_seconds histogram
kvrouter_time_to_first_token_seconds_bucket{le="0.1",mode="kv"} 10.0
kvrouter_time_to_first_token_seconds_bucket{le="0.5",mode="kv"} 30.0
kvrouter_time_to_first_token_seconds_bucket{le="+Inf",mode="kv"} 40.0
kvrouter_time_to_first_token_seconds_count{mode="kv"} 40.0
kvrouter_time_to_first_token_seconds_sum{mode="kv"} 9.0
kvrouter_time_to_first_token_seconds_bucket{le="0.1",mode="random"} 1.0
kvrouter_time_to_first_token_seconds_bucket{le="0.5",mode="random"} 1.0
kvrouter_time_to_first_token_seconds_bucket{le="+Inf",mode="random"} 1.0
kvrouter_queue_wait_seconds_bucket{le="0.1"} not a number
"""


def test_queues_are_those_of_the_router_and_of_all_its_engines() -> None:
    assert busyness(PAGE, LiveLimits()) == Busyness(Queue(3, 9), None, None)


def test_latencies_are_those_of_all_modes_against_the_bounds() -> None:
    found = busyness(PAGE, LiveLimits(ttft_bound_ms=300, itl_bound_ms=10))
    assert found == Busyness(Queue(3, 9), Attained(21.0, 41.0), None)


def test_a_page_without_what_is_looked_for_says_nothing() -> None:
    assert busyness(b"other_metric 1\n", LiveLimits(ttft_bound_ms=1)) == Busyness()


@pytest.mark.parametrize(
    "line",
    [
        b"kvrouter_queued_requests many\n",
        b'kvrouter_time_to_first_token_seconds_bucket{mode="kv"} 1\n',
        b"kvrouter_queued_requests NaN\n",
    ],
)
def test_a_page_that_no_router_makes_is_unreadable(line: bytes) -> None:
    with pytest.raises(PageUnreadable, match=r"^/metrics: "):
        busyness(line, LiveLimits(ttft_bound_ms=1))


def test_why_a_router_is_not_ready() -> None:
    assert not not_ready(b'{"ready":true,"reasons":[],"notes":[]}')
    assert not_ready(b'{"ready":false,"reasons":["a","b"],"notes":[]}') == "not ready: a; b"
    assert not_ready(b'{"ready":false}') == "not ready: it does not say why"
    with pytest.raises(PageUnreadable, match=r"^/ready: "):
        not_ready(b"<html>")


def test_why_a_router_is_of_no_use_for_a_model() -> None:
    body = b'{"object":"list","data":[{"id":"a"},{"id":"b"}]}'
    assert not not_serving(body, ("x", "b"))
    assert not_serving(body, ("x",)) == "serves a, b, wanted x"
    assert not_serving(b'{"data":[]}', ("x", "y")) == "serves no model, wanted x, y"
    with pytest.raises(PageUnreadable, match=r"^/v1/models: "):
        not_serving(b'{"data":1}', ("x",))
