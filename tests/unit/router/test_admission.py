"""Callbacks: each request is admitted or refused once, in its turn, or neither after it was cancelled."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kv_protocol.decided import RouteRequest
from router.decision.policy import Policy
from router.http.refusals import Refusal
from router.queue.config import QueueSection
from router.queue.gate import LOOK_S, Admission
from router.queue.waiting import Place
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import registered, route
from tests.unit.router.test_routing import Bench


class Seats(Admission):
    """Admission to a fleet with room for so many requests."""

    def __init__(self, free: int, clock: ManualClock, limits: QueueSection) -> None:
        super().__init__(cast("Any", SimpleNamespace(clock=clock)), limits)
        self.free = free

    def has_headroom(self, _: RouteRequest) -> bool:
        return self.free > 0

    def uncached_tokens(self, request: RouteRequest) -> int:
        return request.isl_tokens


def asked(
    admission: Admission, request: RouteRequest, admitted: Callable[[], None], refused: Callable[[Refusal], None]
) -> Place | None:
    """Admit the request at once, or have it wait, as a request's driver does."""
    if admission.admits(request):
        admitted()
        return None
    return admission.wait(request, lambda refusal: admitted() if refusal is None else refused(refusal))


class Door:
    """An admission to some seats, and the outcome of each request."""

    def __init__(self, free: int, **limits: Any) -> None:
        self.clock = ManualClock()
        self.admission = self.seats = Seats(free, self.clock, QueueSection(**limits))
        self.admitted: list[str] = []
        self.refused: dict[str, Refusal] = {}

    def ask(self, name: str, **fields: Any) -> Place | None:
        def on_admitted() -> None:
            self.seats.free -= 1
            self.admitted.append(name)

        def on_refused(refusal: Refusal) -> None:
            self.refused[name] = refusal

        return asked(self.admission, route(request_id=name, **fields), on_admitted, on_refused)

    def clock_to(self, now_s: float) -> None:
        asyncio.run(self.clock.advance(now_s - self.clock.now()))

    def leave(self, count: int = 1) -> None:
        self.seats.free += count
        self.admission.poke()


def test_without_headroom_a_request_waits_until_another_ends() -> None:
    door = Door(free=0)
    tickets = [door.ask(name) for name in "abc"]
    assert door.admitted == []
    door.leave(2)
    assert door.admitted == ["a", "b"]
    assert None not in tickets
    assert len(door.admission.queue) == 1


def test_no_request_overtakes_one_that_waits_for_the_same_model() -> None:
    door = Door(free=0)
    door.ask("a")
    door.seats.free = 1
    door.ask("b")
    assert door.admitted == ["a"]
    door.seats.free = 1
    assert door.ask("c", model="other") is None
    assert door.admitted == ["a", "c"]


def test_a_request_that_waits_for_another_kind_blocks_none_even_with_a_full_queue() -> None:
    door = Door(free=0, requests_max=1)
    door.ask("pinned", pinned_worker="busy")
    door.seats.free = 1
    assert door.ask("free") is None
    assert (door.admitted, door.refused) == (["free"], {})


def test_a_request_that_comes_with_headroom_and_an_empty_queue_does_not_wait() -> None:
    door = Door(free=0)
    door.ask("a")
    door.seats.free = 2
    assert door.ask("b") is None
    assert door.admitted == ["a", "b"]


def test_a_callback_that_frees_a_seat_lets_the_next_on_after_it_returned() -> None:
    door = Door(free=0)
    order: list[str] = []

    def passing(name: str) -> Any:
        def on_admitted() -> None:
            order.append(f"{name} begins")
            door.admission.poke()
            order.append(f"{name} ends")

        return on_admitted

    for name in "ab":
        asked(door.admission, route(request_id=name), passing(name), lambda _: None)
    door.leave()
    assert order == ["a begins", "a ends", "b begins", "b ends"]


def test_a_cancelled_request_is_never_called() -> None:
    door = Door(free=0)
    first, second = door.ask("a"), door.ask("b")
    assert first is not None
    assert second is not None
    door.admission.cancel(first)
    door.admission.cancel(first)
    door.leave(2)
    assert (door.admitted, door.refused) == (["b"], {})
    door.admission.cancel(second)
    assert len(door.admission.queue) == 0


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ("requests_max", (503, "server_error", "queue_full", "failed")),
        ("tenant_requests_max", (429, "rate_limit_error", "tenant_full", "refused")),
    ],
)
def test_a_full_queue_refuses_at_once(bound: str, told: tuple[Any, ...]) -> None:
    door = Door(free=0, **{bound: 1})
    door.ask("a", tenant="x")
    assert door.ask("b", tenant="x") is None
    refusal = door.refused["b"]
    assert (refusal.status, refusal.kind, refusal.code, refusal.outcome) == told
    assert refusal.headers == ((b"retry-after", b"30"),)


def test_a_request_that_waits_too_long_is_refused_and_the_younger_waits_on() -> None:
    door = Door(free=0, wait_s=1.0)
    old = door.ask("old")
    door.clock_to(0.9)
    young = door.ask("young")
    door.clock_to(0.99)
    door.admission.look()
    assert door.refused == {}
    door.clock_to(1.0)
    door.admission.look()
    assert {name: (refusal.status, refusal.code) for name, refusal in door.refused.items()} == {"old": (503, "timeout")}
    assert door.refused["old"].message == "queue.wait_s: no worker had room for the request within 1 s"
    assert [each.arrived_s for each in (old, young) if each] == [0.0, pytest.approx(0.9)]


async def test_headroom_without_an_event_is_found_by_time_alone() -> None:
    door, stop = Door(free=0), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(door.admission.run(stop))
        door.ask("a")
        door.seats.free = 1
        while not door.admitted:
            await door.clock.advance(LOOK_S)
        stop.set()
    assert door.admitted == ["a"]


async def test_waiting_and_later_requests_are_refused_when_the_router_stops() -> None:
    door, stop = Door(free=0), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(door.admission.run(stop))
        door.ask("a")
        door.ask("other", model="other")
        stop.set()
    assert door.ask("b") is None
    codes = {name: refusal.code for name, refusal in door.refused.items()}
    assert codes == dict.fromkeys(("a", "other", "b"), "stopping")
    door.seats.free = 1
    assert door.ask("c") is None
    assert door.admitted == ["c"]


# ---------------------------------------------------------------- the fleet's room


def fleet(*, holds: int = 0, threshold: float | None = 1.0, **policy: Any) -> tuple[Bench, Admission]:
    workers = [registered(name, max_num_batched_tokens=64) for name in ("w0", "w1")]
    bench = Bench(*workers, holds=holds, policy=Policy(**policy))
    return bench, Admission(bench.routing, QueueSection(threshold=threshold))


def give(bench: Bench, *workers: str, isl_tokens: int = 65) -> None:
    for worker in workers:
        given = len(bench.routing.decisions.newest(1000))
        bench.take(route(isl_tokens, decision_id=f"g{given}", pinned_worker=worker, sequence_hashes=b""))


def test_a_fleet_has_room_until_every_rank_is_over_its_threshold() -> None:
    bench, room = fleet()
    assert room.has_headroom(route())
    give(bench, "w0")
    assert room.has_headroom(route())
    assert not room.has_headroom(route(pinned_worker="w0"))
    give(bench, "w1")
    assert not room.has_headroom(route())


def test_without_a_threshold_there_is_always_room_and_a_mode_that_reads_no_load_changes_nothing() -> None:
    for threshold, mode in ((None, "kv"), (1.0, "round-robin")):
        bench, room = fleet(threshold=threshold, mode=mode)
        give(bench, "w0", "w1")
        assert room.has_headroom(route()) is (threshold is None), mode


@pytest.mark.parametrize("unmet", ["admit", "queue"])
def test_unmet_targets_leave_no_headroom_if_the_policy_lets_requests_wait(unmet: Any) -> None:
    _, room = fleet(threshold=None, mode="predicted-ttft", unmet=unmet)
    assert room.has_headroom(route(itl_target_s=1e-9)) is (unmet == "admit")
    assert room.has_headroom(route(itl_target_s=1e9))


@pytest.mark.parametrize(("holds", "uncached"), [(0, 40), (1, 24), (2, 8), (9, 8)])
def test_what_a_request_costs_is_what_no_rank_has_of_it(holds: int, uncached: int) -> None:
    assert fleet(holds=holds)[1].uncached_tokens(route(40)) == uncached


def test_a_request_without_an_eligible_rank_has_headroom_and_no_cached_tokens() -> None:
    _, room = fleet(holds=9)
    nowhere = route(40, pinned_worker="gone")
    assert (room.has_headroom(nowhere), room.uncached_tokens(nowhere)) == (True, 40)


def test_a_request_that_waited_is_placed_by_the_load_at_its_admission() -> None:
    bench, admission = fleet()
    give(bench, "w0")
    running = bench.take(route(65, decision_id="r", pinned_worker="w1"))
    winners: list[str] = []

    def admitted() -> None:
        request = route(65, decision_id=f"d{len(winners)}", sequence_hashes=b"")
        verdict = bench.routing.decide(request)
        winners.append(verdict.winner.worker_id)
        bench.routing.take(verdict)

    for _ in range(2):
        asked(admission, route(65, sequence_hashes=b""), admitted, lambda _: None)
    assert winners == []
    running.end("ok")
    admission.poke()
    assert winners == ["w1"]
