"""Every cell of the breakers' table, whose fault a 500 is, and a worker that refuses the router's token."""

from typing import Any

import pytest

from kv_protocol.journal import AttemptEnded
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed
from router.fleet.breakers import BreakerLimits, Breakers
from tests.unit.router.plane import Plane, running_plane
from tests.unit.router.samples import rank
from tests.unit.router.upstream import Upstream, answers

_REFUSAL = b'{"error":{"message":"no","type":"t","param":null,"code":null}}'
_GOOD = answers(200, b"{}")


@pytest.mark.parametrize("status", [401, 407])
async def test_a_worker_that_refuses_the_routers_token_is_left_alone_and_another_answers(status: int) -> None:
    async with running_plane() as plane, Upstream(answers(status, _REFUSAL)) as deaf, Upstream(_GOOD) as good:
        plane.join("w0", deaf.base_url, holds=3)
        plane.join("w1", good.base_url)
        answered = [await _status(plane) for _ in range(4)]
        assert (answered, len(deaf.received)) == ([200] * 4, 3)
        assert plane.unfit("w0") == f"breaker open: first_byte: status {status}: the worker refuses data.worker_token"


@pytest.mark.parametrize(("status", "is_open"), [(500, False), (502, True), (504, True)])
async def test_an_error_that_every_request_gets_opens_a_breaker_only_if_it_cannot_be_the_requests_fault(
    status: int, is_open: bool
) -> None:
    async with running_plane() as plane, Upstream(answers(status, _REFUSAL)) as worker:
        plane.join("w0", worker.base_url)
        for _ in range(3):
            await _status(plane)
        assert plane.unfit("w0") == (f"breaker open: first_byte: status {status}" if is_open else "")


async def _status(plane: Plane) -> int:
    return (await plane.post()).status


LIMITS = BreakerLimits(failures=3, window_s=60.0, open_s=10.0, open_s_max=35.0)
W0, W0_1, W1 = rank("w0/0"), rank("w0/1"), rank("w1/0")


class Told:
    """Breakers, and a clock that its user moves."""

    def __init__(self, limits: BreakerLimits = LIMITS) -> None:
        self.breakers, self.now_s = Breakers(limits), 100.0

    def ended(self, outcome: Any, at: str = "w0/0", **fields: Any) -> None:
        self.breakers.apply(
            AttemptEnded(
                now_s=self.now_s, worker_id=rank(at).worker_id, dp_rank=rank(at).dp_rank, outcome=outcome, **fields
            )
        )

    def failed(self, times: int = 1, at: str = "w0/0", **fields: Any) -> None:
        for _ in range(times):
            self.ended("failed", at, phase="body", reason="cut", **fields)

    def routed(self, lease_id: str = "probe", at: str = "w0/0") -> None:
        self.follow(
            Routed(
                lease_id=lease_id, worker_id=rank(at).worker_id, dp_rank=rank(at).dp_rank, blocks=b"", uncached_tokens=0
            )
        )

    def follow(self, event: LedgerEvent) -> None:
        self.breakers.follow(event, self.now_s)

    def unfit(self, at: str = "w0/0") -> str:
        return self.breakers.unfit(rank(at), self.now_s)

    def state(self, at: str = "w0/0") -> str:
        return self.breakers.state(rank(at), self.now_s)


def opened() -> Told:
    told = Told()
    told.failed(3)
    assert told.state() == "open"
    return told


def half_open() -> Told:
    told = opened()
    told.now_s += LIMITS.open_s
    assert told.state() == "half_open"
    return told


def probing() -> Told:
    told = half_open()
    told.routed("probe")
    return told


# ---------------------------------------------------------------- closed


def test_so_many_failures_in_a_row_open_it_and_an_ok_or_a_long_time_between_begins_the_row_anew() -> None:
    told = Told()
    told.failed(2)
    told.ended("ok")
    told.failed(2)
    assert (told.unfit(), told.state()) == ("", "closed")
    told.failed()
    assert (told.unfit(), told.unfit("w0/1")) == ("breaker open: body: cut", "")
    assert told.breakers.statistics.opened_total == 1
    seldom = Told()
    for _ in range(9):
        seldom.failed()
        seldom.now_s += LIMITS.window_s / 2 + 1
    assert seldom.state() == "closed"


@pytest.mark.parametrize("outcome", ["client_fault", "cancelled", "erred"])
def test_outcomes_without_a_fault_of_the_worker_neither_open_nor_reset(outcome: str) -> None:
    told = Told()
    told.failed(2)
    for _ in range(9):
        told.ended(outcome)
    assert told.state() == "closed"
    told.failed()
    assert told.state() == "open"


def test_a_refused_connection_opens_at_once_for_every_rank_of_the_worker() -> None:
    told = Told()
    told.ended("failed", phase="connect", reason="ConnectionRefusedError")
    assert told.unfit("w0/0") == told.unfit("w0/1") == "breaker open: connect: ConnectionRefusedError"
    assert told.unfit("w1/0") == ""


# ---------------------------------------------------------------- back-pressure


def test_back_pressure_leaves_the_rank_alone_for_as_long_as_it_asks_and_opens_nothing() -> None:
    told = Told()
    for _ in range(9):
        told.ended("back_pressure", retry_after_s=5.0)
    assert told.unfit() == "busy: it asked to be left alone for 5 s"
    assert told.state() == "closed"
    assert told.breakers.valid_until_s(told.now_s) == told.now_s + 5.0
    told.now_s += 5.0
    assert told.unfit() == ""


@pytest.mark.parametrize(("asked_s", "left_alone_s"), [(None, 1.0), (1e9, 30.0), (0.0, 0.0), (-3.0, 0.0)])
def test_how_long_a_busy_rank_is_left_alone_is_bounded(asked_s: float | None, left_alone_s: float) -> None:
    told = Told()
    told.ended("back_pressure", retry_after_s=asked_s)
    assert (told.unfit() != "") == (left_alone_s > 0)
    told.now_s += left_alone_s
    assert told.unfit() == ""


def test_an_ok_of_another_request_does_not_end_the_time_that_a_rank_asked_for() -> None:
    told = Told()
    told.ended("back_pressure", retry_after_s=5.0)
    told.ended("ok")
    assert told.unfit().startswith("busy")


# ---------------------------------------------------------------- open, half-open


def test_an_open_breaker_ends_by_time_and_then_lets_one_request_at_a_time_try() -> None:
    told = opened()
    assert told.breakers.valid_until_s(told.now_s) == told.now_s + LIMITS.open_s
    told.now_s += LIMITS.open_s
    assert told.unfit() == ""
    told.routed("probe")
    assert told.unfit() == "breaker half-open: one request is trying whether it is over: body: cut"


@pytest.mark.parametrize("outcome", ["ok", "failed", "client_fault"])
def test_while_it_is_open_old_attempts_that_end_change_nothing(outcome: str) -> None:
    told = opened()
    until_s = told.breakers.valid_until_s(told.now_s)
    told.now_s += 1.0
    told.ended(outcome, decision_id="old")
    assert (told.state(), told.breakers.valid_until_s(told.now_s)) == ("open", until_s)


@pytest.mark.parametrize("outcome", ["ok", "failed"])
def test_in_a_half_open_breaker_old_attempts_that_end_change_nothing(outcome: str) -> None:
    told = probing()
    told.ended(outcome, phase="body", decision_id="old")
    assert told.state() == "half_open"
    assert told.unfit() != ""


@pytest.mark.parametrize(("outcome", "state"), [("ok", "closed"), ("failed", "open")])
def test_what_a_probe_came_to_counts_whether_it_is_told_before_its_lease_ends_or_after(
    outcome: str, state: str
) -> None:
    for is_lease_first in (True, False):
        told = probing()
        if is_lease_first:
            told.follow(Finished(lease_id="probe"))
        told.ended(outcome, phase="body", decision_id="probe")
        if not is_lease_first:
            told.follow(Finished(lease_id="probe"))
        assert told.state() == state


def test_a_probe_that_is_answered_closes_it_and_all_is_forgiven() -> None:
    told = probing()
    told.ended("ok", decision_id="probe")
    assert (told.unfit(), told.state()) == ("", "closed")
    told.failed(3)
    assert told.breakers.valid_until_s(told.now_s) == told.now_s + LIMITS.open_s
    assert told.breakers.statistics.closed_total == 1


def test_a_probe_that_fails_opens_it_again_for_twice_as_long_up_to_a_bound() -> None:
    told, waits_s = opened(), []
    for _ in range(4):
        until_s = told.breakers.valid_until_s(told.now_s)
        waits_s.append(until_s - told.now_s)
        told.now_s = until_s
        told.routed("probe")
        told.failed(decision_id="probe")
    assert waits_s == [10.0, 20.0, 35.0, 35.0]


@pytest.mark.parametrize("outcome", ["client_fault", "cancelled", "erred"])
def test_a_probe_that_says_nothing_of_the_rank_makes_way_for_another(outcome: str) -> None:
    told = probing()
    told.ended(outcome, decision_id="probe")
    assert (told.unfit(), told.state()) == ("", "half_open")
    told.routed("next")
    assert told.unfit() != ""


@pytest.mark.parametrize("ending", [Finished, Cancelled, Expired])
def test_a_probe_whose_lease_ends_without_a_word_makes_way_for_another(ending: Any) -> None:
    told = probing()
    told.follow(ending(lease_id="probe"))
    assert (told.unfit(), told.state()) == ("", "half_open")


def test_the_first_token_of_a_probe_lets_others_in_until_the_next_failure() -> None:
    told = probing()
    told.follow(FirstToken(lease_id="probe"))
    assert (told.unfit(), told.state()) == ("", "closed")
    told.failed()
    assert told.breakers.valid_until_s(told.now_s) == told.now_s + 20.0


def test_a_probe_of_a_refused_connection_is_one_for_all_ranks_of_the_worker() -> None:
    told = Told()
    told.ended("failed", phase="connect", reason="refused")
    told.now_s += LIMITS.open_s
    told.routed("probe", at="w0/1")
    assert told.unfit("w0/0").startswith("breaker half-open")
    told.ended("ok", at="w0/1", decision_id="probe")
    assert (told.unfit("w0/0"), told.unfit("w0/1")) == ("", "")


def test_a_worker_that_begins_anew_is_held_nothing_against_and_no_other() -> None:
    told = opened()
    told.ended("failed", phase="connect")
    told.failed(3, at="w/0")
    told.breakers.forget("w0")
    assert (told.unfit(), told.state("w/0")) == ("", "open")


def test_a_probe_of_a_worker_that_left_has_no_effect() -> None:
    told = probing()
    told.breakers.forget("w0")
    told.ended("ok", decision_id="probe")
    assert told.breakers.statistics.closed_total == 0


def test_every_change_of_the_answer_by_an_event_is_announced() -> None:
    told = Told()
    steps: list[Any] = [
        lambda: told.failed(3),
        lambda: setattr(told, "now_s", told.now_s + LIMITS.open_s),
        lambda: told.routed("probe"),
        lambda: told.ended("cancelled", decision_id="probe"),
        lambda: told.routed("probe"),
        lambda: told.follow(FirstToken(lease_id="probe")),
        told.failed,
        lambda: told.ended("back_pressure", retry_after_s=3.0),
        lambda: told.breakers.forget("w0"),
    ]
    for step in steps:
        before, changes, time_s = told.unfit(), told.breakers.changes, told.now_s
        step()
        assert told.unfit() == before or told.breakers.changes > changes or told.now_s > time_s


# ---------------------------------------------------------------- whose fault is a 500


def test_a_500_counts_once_another_rank_has_answered_the_request() -> None:
    told = Told()
    for _ in range(3):
        assert told.state() == "closed"
        told.ended("erred")
        told.ended("ok", at="w1/0", erred_before=(W0,))
    assert told.unfit() == "breaker open: it failed a request that another rank answered"
    assert told.unfit("w1/0") == ""
