"""Ranks of which requests show that they are predicted wrongly lose trust, and get it back; a healthy fleet has all.

Fleets live in virtual time, with caches that evict all the time, and a router that restarts. The same fleets with an
engine that is wrong are the proof that something is compared.
"""

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from bench.routing.virtual_router import describe
from bench.routing.workloads import SyntheticShape, synthetic_trace
from kv_protocol.decided import RouteRequest
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from router.decision.policy import Policy
from router.decision.routing import compared_of
from router.decision.verdict import Verdict
from router.feeds.watch import FleetWatch
from router.fleet.trust import ENOUGH, RETRY_S, WINDOW, Calibration, Compared, Move
from tests.support.watched_routing import Told, WatchedRouting
from tests.unit.router.samples import BLOCK_SIZE, rank, registered, route
from tests.unit.router.test_routing import Bench


class Judge:
    """Compares each answer with its prediction; a restarted router has another one."""

    def __init__(self, reported: Callable[[Verdict, int], int]) -> None:
        self.calibration = Calibration()
        self.compared = self.overpredicted = 0
        self._reported = reported
        self._verdicts = dict[str, Verdict]()

    def record(self, what: Told) -> None:
        """See a decision, or its outcome."""
        if isinstance(what, Verdict):
            self._verdicts[what.decision_id] = what
        elif isinstance(what, OutcomeKnown) and what.cached_tokens is not None:
            verdict = self._verdicts.pop(what.decision_id)
            compared = compared_of(verdict, self._reported(verdict, what.cached_tokens))
            if compared is not None:
                self.compared += 1
                self.overpredicted += compared.held_tokens - compared.reported_tokens >= compared.block_size
                self.calibration.apply(compared, what.now_s)


TRACE = synthetic_trace(
    SyntheticShape(
        sessions=60,
        turns=4.0,
        systems=6,
        system_tokens=1024,
        question_tokens=300,
        answer_tokens=60,
        think_s=5.0,
        session_rate=3.0,
    ),
    seed=3,
)
LONGEST = max(each.isl_tokens + each.osl_tokens for each in TRACE)


def live(room: float, seed: int, reported: Callable[[Verdict, int], int] = lambda _, cached: cached) -> list[Judge]:
    """Play the trace on workers with room for so many of its longest requests; return the routers' judges."""
    judges = list[Judge]()

    def judged(*given: Any, **named: Any) -> WatchedRouting:
        judges.append(Judge(reported))
        return WatchedRouting(*given, watch=[judges[-1].record], **named)

    shape = VirtualFleetShape(
        (describe((int(room * LONGEST) // 512 + 1) * 512, 64),) * 3,
        lag_s=0.05,
        restart_s=TRACE[len(TRACE) // 2].arrival_s,
    )
    VirtualFleet(shape, Policy(), TRACE, seed=seed, new_routing=judged).run()
    return judges


@pytest.mark.parametrize(("room", "seed"), [(1.2, 3), (1.2, 4), (3.0, 3)])
def test_a_healthy_fleet_is_not_doubted(room: float, seed: int) -> None:
    judges = live(room, seed)
    shown = [(judge.compared, judge.overpredicted, judge.calibration.begun_total) for judge in judges]
    assert sum(judge.compared for judge in judges) > len(TRACE) * 0.9, shown
    assert all(not any(judge.calibration.begun_total.values()) for judge in judges), shown


@pytest.mark.parametrize(
    ("reports", "doubt"),
    [(lambda _cached, _isl_tokens: 0, "overpredicted"), (lambda _cached, isl_tokens: isl_tokens - 1, "underpredicted")],
    ids=["lying", "boasting"],
)
def test_one_wrong_worker_in_such_a_fleet_is_doubted_and_no_other(
    reports: Callable[[int, int], int], doubt: str
) -> None:
    def reported(verdict: Verdict, cached: int) -> int:
        return reports(cached, verdict.request.isl_tokens) if verdict.winner.worker_id == "w0" else cached

    found = [judge.calibration.evidence for judge in live(3.0, 3, reported)]
    assert [{each: move.doubt for each, move in of.items()} for of in found] == [{WorkerRank("w0", 0): doubt}] * 2


FOUND_WITHIN = 200
"""Requests of a rank, of which half show something."""


class Compares:
    """Requests at one rank after the other."""

    def __init__(self) -> None:
        self.calibration, self.now_s = Calibration(), 0.0

    def see(self, held: int, reported: int, *, count: int = 1, possible: int = 0, epoch: int = 1) -> list[Move]:
        """Fold requests in: blocks held, reused, and possibly reused. Return the moves that they make."""
        for number in range(count):
            compared = Compared(
                rank=rank(),
                epoch=epoch,
                decision_id=f"d-{number}",
                block_size=BLOCK_SIZE,
                held_tokens=held * BLOCK_SIZE,
                possible_tokens=max(held, possible) * BLOCK_SIZE,
                reported_tokens=reported * BLOCK_SIZE,
            )
            self.calibration.apply(compared, self.now_s)
        return self.moves()

    def moves(self) -> list[Move]:
        """Take the moves out."""
        moves = list(self.calibration.moves)
        self.calibration.moves.clear()
        return moves

    @property
    def doubt(self) -> str:
        return self.calibration.doubts_of((rank(),), ("",))[0]


@pytest.mark.parametrize(
    ("held", "reported", "possible", "doubt"),
    [
        (4, 4, 4, ""),
        (4, 3, 4, "overpredicted"),
        (4, 0, 9, "overpredicted"),
        (0, 4, 0, "underpredicted"),
        (2, 4, 3, "underpredicted"),
        (0, 4, 4, ""),
        (0, 0, 4, ""),
        (0, 0, 0, ""),
    ],
)
def test_a_rank_is_doubted_if_it_reuses_less_than_it_holds_or_more_than_was_possible(
    held: int, reported: int, possible: int, doubt: str
) -> None:
    seen = Compares()
    seen.see(held, reported, count=ENOUGH - 1, possible=possible)
    assert seen.doubt == ""
    seen.see(held, reported, possible=possible)
    assert seen.doubt == doubt


def test_less_than_a_block_is_no_difference() -> None:
    calibration = Calibration()
    for held, reported in [(64, 64 - BLOCK_SIZE + 1), (64, 64 + BLOCK_SIZE - 1)] * WINDOW:
        calibration.apply(Compared(rank(), 1, "d", BLOCK_SIZE, held, held, reported), 0.0)
    assert calibration.evidence == {}


def test_requests_that_show_nothing_do_not_count() -> None:
    seen = Compares()
    seen.see(4, 0, count=ENOUGH - 1)
    seen.see(0, 0, count=10 * WINDOW)
    assert seen.see(4, 0) == [Move(rank(), "overpredicted", False, ENOUGH, ENOUGH, 0, "d-0")]


def test_a_few_wrong_predictions_are_no_doubt() -> None:
    seen = Compares()
    for _ in range(10):
        seen.see(4, 4, count=5)
        seen.see(4, 0, count=2)
        seen.see(0, 4, count=2)
    assert seen.doubt == ""


def test_overpredicted_ends_with_fewer_than_a_quarter_of_the_last_requests() -> None:
    seen = Compares()
    seen.see(4, 0, count=WINDOW)
    seen.see(4, 4, count=WINDOW - WINDOW // 4)
    assert seen.doubt == "overpredicted"
    (move,) = seen.see(4, 4)
    assert (move.doubt, move.is_over, move.overpredicted, seen.doubt) == ("overpredicted", True, WINDOW // 4 - 1, "")


def test_underpredicted_ends_by_time_and_begins_again_from_new_requests_alone() -> None:
    seen = Compares()
    seen.see(0, 4, count=WINDOW)
    seen.calibration.tick(RETRY_S - 1, [rank()])
    assert seen.moves() == []
    seen.calibration.tick(RETRY_S, [rank()])
    (move,) = seen.moves()
    assert (move.doubt, move.is_over, seen.doubt) == ("underpredicted", True, "")
    seen.see(0, 4, count=ENOUGH - 1)
    assert seen.doubt == ""
    seen.see(0, 4)
    assert (seen.doubt, seen.calibration.begun_total["underpredicted"]) == ("underpredicted", 2)


def test_another_epoch_of_the_stream_is_judged_anew() -> None:
    seen = Compares()
    seen.see(4, 0, count=ENOUGH)
    (move,) = seen.see(4, 0, epoch=2)
    assert (move.doubt, move.is_over, seen.doubt) == ("overpredicted", True, "")
    seen.see(4, 0, epoch=2, count=ENOUGH - 1)
    assert seen.doubt == "overpredicted"


def test_ranks_that_left_are_forgotten() -> None:
    seen = Compares()
    seen.see(4, 0, count=ENOUGH)
    seen.calibration.tick(1.0, [])
    assert seen.moves() == []
    assert seen.doubt == ""
    seen.see(4, 0, count=ENOUGH - 1)
    assert seen.doubt == ""


def test_a_doubt_of_the_index_comes_first_and_the_columns_stay_the_same_object() -> None:
    seen = Compares()
    seen.see(4, 0, count=ENOUGH)
    ranks = (rank(), rank("w1/0"))
    assert seen.calibration.doubts_of(ranks, ("behind", "")) == ("behind", "")
    found = seen.calibration.doubts_of(ranks, ("", ""))
    assert found == ("overpredicted", "")
    assert seen.calibration.doubts_of(ranks, ("", "")) is found


# ------------------------------------------------------------------------------------------------ with decisions


def ask(bench: Bench, reported_tokens: int, request: RouteRequest | None = None) -> str:
    """Let one request be decided and answered; return the trust that it was decided with."""
    verdict = bench.routing.decide(request or route())
    bench.routing.take(verdict).end("ok")
    bench.routing.compare(verdict, reported_tokens)
    return verdict.trust


@pytest.mark.parametrize(
    ("holds", "reported_blocks", "trust", "reason"),
    [(2, 0, "DEGRADED", "overpredicted"), (0, 2, "FALLBACK", "underpredicted; approximate")],
)
def test_decisions_have_the_lower_trust_and_pages_and_log_say_why(
    holds: int, reported_blocks: int, trust: str, reason: str
) -> None:
    bench = Bench(registered(), holds=holds)
    trusts = [ask(bench, reported_blocks * BLOCK_SIZE) for _ in range(FOUND_WITHIN)]
    assert trusts.index(trust) == ENOUGH
    assert bench.routing.trust()[rank()] == (trust, reason)
    with capture_logs() as logs:
        FleetWatch(bench.routing, dict).look()
    (said,) = logs
    counts = [said[name] for name in ("requests", "overpredicted", "underpredicted")]
    assert (said["event"], said["worker"], said["doubt"]) == ("predictions_doubted", "w0", reason.partition(";")[0])
    assert counts == [ENOUGH, ENOUGH if holds else 0, 0 if holds else ENOUGH]


@pytest.mark.parametrize(
    "made",
    [
        *({"holds": 2, "stale": stale} for stale in ("log_away", "behind", "never_heard", "source")),
        {"policy": Policy(predict_on_route=False)},
        {"policy": Policy(mode="round-robin")},
    ],
    ids=["log away", "behind", "never heard", "source", "predicts nothing", "asks no index"],
)
def test_where_the_index_is_in_doubt_or_not_asked_or_nothing_is_predicted_nothing_is_compared(
    made: dict[str, Any],
) -> None:
    bench = Bench(registered(), **made)
    for reported in [0, 2 * BLOCK_SIZE] * WINDOW:
        ask(bench, reported)
    assert bench.routing.calibration.evidence == {}


async def test_the_passing_of_time_gives_an_underpredicted_rank_another_try() -> None:
    bench = Bench(registered())
    for _ in range(ENOUGH):
        ask(bench, 2 * BLOCK_SIZE)
    assert bench.routing.trust()[rank()].state == "FALLBACK"
    await bench.clock.advance(RETRY_S)
    bench.routing.tick()
    assert bench.routing.trust()[rank()].state == "EXACT"
    moves = [(each.doubt, each.is_over) for each in bench.routing.calibration.moves]
    assert moves == [("underpredicted", False), ("underpredicted", True)]
