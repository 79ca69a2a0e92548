"""The queue: its order, its bounds, and how long is to be waited before a retry."""

from typing import Any

import pytest

from kv_protocol.decided import RouteRequest
from router.http.refusals import Refusal
from router.queue.config import QueueSection
from router.queue.waiting import KINDS_MAX, OTHERS, Place, RequestQueue
from tests.unit.router.samples import route


def limits(**bounds: int) -> QueueSection:
    """Return a section with other bounds than those that no setting changes."""
    bounded: QueueSection = type("Bounded", (QueueSection,), bounds)()
    return bounded


def placed(queue: RequestQueue, name: str, tokens: int = 10, now_s: float = 0.0, **fields: Any) -> Place:
    place = queue.offer(route(request_id=name, **fields), tokens, now_s, lambda _: None)
    assert isinstance(place, Place)
    return place


def refused(queue: RequestQueue, name: str, tokens: int = 10, now_s: float = 0.0, **fields: Any) -> Refusal:
    refusal = queue.offer(route(request_id=name, **fields), tokens, now_s, lambda _: None)
    assert isinstance(refusal, Refusal)
    return refusal


def is_room(_: RouteRequest) -> bool:
    return True


def taken(queue: RequestQueue, model: str = "m", now_s: float = 0.0) -> list[str]:
    """Take all, and return their names."""
    names = []
    while (place := queue.take(model, is_room, now_s)) is not None:
        names.append(place.request.request_id)
    return names


# ---------------------------------------------------------------- order


def test_edf_takes_the_most_urgent_first() -> None:
    queue = RequestQueue(QueueSection(policy="edf"))
    placed(queue, "default", now_s=0.0)
    placed(queue, "patient", now_s=0.0, ttft_target_s=60.0)
    placed(queue, "late", now_s=8.0, ttft_target_s=1.5)
    placed(queue, "later", now_s=8.0, ttft_target_s=3.0)
    assert taken(queue) == ["late", "default", "later", "patient"]


def test_no_tenant_starves_another_by_strict_priority() -> None:
    queue = RequestQueue(QueueSection())
    for number in range(4):
        placed(queue, f"loud{number}", tenant="loud", strict_priority=9)
    placed(queue, "meek", tenant="meek")
    assert taken(queue)[:2] == ["loud0", "meek"]


def test_a_tenant_that_comes_anew_or_could_not_go_brings_nothing_along() -> None:
    queue = RequestQueue(QueueSection())
    for number in range(20):
        placed(queue, "a", tenant="a")
        placed(queue, "b", tenant="b", lora="x")
        if number < 5:
            placed(queue, "c", tenant="c")

    def has_headroom(request: RouteRequest) -> bool:
        return not request.lora

    first = [queue.take("m", has_headroom, 0.0) for _ in range(15)]
    assert [place.tenant for place in first if place] == [*"acacacacac", *"aaaaa"]
    placed(queue, "d", tenant="d")
    assert taken(queue)[:8] == [*"babdabab"]


# ---------------------------------------------------------------- room


def test_of_one_tenant_so_many_kinds_are_looked_at_and_no_more() -> None:
    queue, looks = RequestQueue(QueueSection()), list[str]()
    for number in range(3 * KINDS_MAX):
        placed(queue, str(number), lora=str(number))

    def has_headroom(request: RouteRequest) -> bool:
        looks.append(request.lora)
        return False

    assert queue.take("m", has_headroom, 0.0) is None
    assert looks == [str(number) for number in range(KINDS_MAX)]
    assert taken(queue) == [str(number) for number in range(3 * KINDS_MAX)]


def test_room_is_looked_for_once_a_turn_for_each_kind_of_constraints() -> None:
    queue = RequestQueue(QueueSection())
    for tenant in "abcdef":
        placed(queue, tenant, tenant=tenant, lora="x" if tenant in "ace" else "")
    looks: list[str] = []

    def has_headroom(request: RouteRequest) -> bool:
        looks.append(request.lora)
        return False

    assert queue.take("m", has_headroom, 0.0) is None
    assert sorted(looks) == ["", "x"]


# ---------------------------------------------------------------- bounds


def test_beyond_the_bound_of_requests_the_fleet_is_said_to_be_full() -> None:
    queue = RequestQueue(QueueSection(requests_max=2))
    placed(queue, "a", tenant="x")
    placed(queue, "b", tenant="y")
    refusal = refused(queue, "c", tenant="z")
    assert (refusal.status, refusal.code) == (503, "queue_full")
    assert refusal.message == (
        "queue.requests_max: 2 requests with 20 tokens wait, and 10 tokens came; allowed 2 requests, 16000000 tokens"
    )


def test_beyond_the_bound_of_tokens_too_but_for_one_that_waits_alone() -> None:
    queue = RequestQueue(limits(tokens_max=100))
    placed(queue, "huge", tokens=1000)
    assert refused(queue, "more", tokens=1).code == "queue_full"
    assert taken(queue) == ["huge"]
    placed(queue, "a", tokens=60)
    placed(queue, "b", tokens=40)
    assert refused(queue, "c", tokens=1).code == "queue_full"


def test_beyond_the_bound_of_tenants_the_others_are_one() -> None:
    queue = RequestQueue(limits(tenants_max=2))
    tenants = [placed(queue, tenant, tenant=tenant).tenant for tenant in "abcdb"]
    assert tenants == ["a", "b", OTHERS, OTHERS, "b"]


def test_retry_after_is_what_waits_at_the_rate_that_went_of_late() -> None:
    queue = RequestQueue(QueueSection(requests_max=10))
    for _ in range(200):  # 100 tokens every 0.1 s
        placed(queue, "a", tokens=100, now_s=0.1 * _)
        queue.take("m", is_room, 0.1 * _)
    for _ in range(10):
        placed(queue, "b", tokens=1000, now_s=20.0)
    assert refused(queue, "c", now_s=20.0).retry_after_s == pytest.approx(10_000 / 750, rel=0.05)


@pytest.mark.parametrize(("wait_s", "most_s"), [(5.0, 5.0), (30.0, 30.0), (600.0, 60.0)])
def test_while_nothing_goes_retry_after_is_the_wait_itself_or_a_minute(wait_s: float, most_s: float) -> None:
    queue = RequestQueue(QueueSection(requests_max=1, wait_s=wait_s))
    placed(queue, "a", tokens=1)
    assert refused(queue, "b").retry_after_s == most_s
    queue.take("m", is_room, 0.0)
    placed(queue, "c", tokens=1_000_000)
    queue.take("m", is_room, 0.0)
    placed(queue, "d", tokens=1)
    assert refused(queue, "e").retry_after_s == 1.0, "a second at least"
