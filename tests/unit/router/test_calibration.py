"""Ranks of which requests show that they are predicted wrongly lose trust, and get it back."""

import pytest
from structlog.testing import capture_logs

from kv_protocol.decided import RouteRequest
from router.decision.policy import Policy
from router.feeds.watch import FleetWatch
from router.fleet.trust import ENOUGH, RETRY_S, WINDOW, Calibration, Compared, Move
from tests.unit.router.samples import BLOCK_SIZE, rank, registered, route
from tests.unit.router.test_routing import Bench

FOUND_WITHIN = 200
"""Requests of a rank, of which half show something."""


class Compares:
    """Requests at one rank after the other."""

    def __init__(self) -> None:
        self.calibration, self.now_s = Calibration(), 0.0

    def see(self, held: int, reported: int, *, count: int = 1, possible: int = 0, epoch: int = 1) -> list[Move]:
        """Fold requests in: blocks held, reused, and possibly reused."""
        moves = list[Move]()
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
            moves += self.calibration.apply(compared, self.now_s)
        return moves

    @property
    def doubt(self) -> str:
        return self.calibration.doubts.get(rank(), "")


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
    assert calibration.doubts == {}


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
    assert seen.calibration.tick(RETRY_S - 1, [rank()]) == []
    (move,) = seen.calibration.tick(RETRY_S, [rank()])
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
    assert seen.calibration.tick(1.0, []) == []
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
        FleetWatch(bench.routing, bench.clock).look()
    (said,) = logs
    counts = [said[name] for name in ("requests", "overpredicted", "underpredicted")]
    assert (said["event"], said["worker"], said["doubt"]) == ("predictions_doubted", "w0", reason.partition(";")[0])
    assert counts == [ENOUGH, ENOUGH if holds else 0, 0 if holds else ENOUGH]


@pytest.mark.parametrize("stale", ["log_away", "behind", "never_heard", "source"])
def test_while_the_index_has_a_doubt_of_its_own_nothing_is_compared(stale: str) -> None:
    bench = Bench(registered(), holds=2, stale=stale)
    for reported in [0, 40] * WINDOW:
        ask(bench, reported)
    assert bench.routing.calibration.doubts == {}


def test_without_predictions_of_requests_in_flight_nothing_is_compared() -> None:
    bench = Bench(registered(), policy=Policy(predict_on_route=False))
    for _ in range(WINDOW):
        ask(bench, 2 * BLOCK_SIZE)
    assert bench.routing.calibration.doubts == {}


def test_modes_that_do_not_ask_the_index_compare_nothing() -> None:
    bench = Bench(registered(), policy=Policy(mode="round-robin"))
    for _ in range(WINDOW):
        ask(bench, 2 * BLOCK_SIZE)
    assert bench.routing.calibration.doubts == {}


async def test_the_passing_of_time_gives_an_underpredicted_rank_another_try() -> None:
    bench = Bench(registered())
    for _ in range(ENOUGH):
        ask(bench, 2 * BLOCK_SIZE)
    assert bench.routing.trust()[rank()].state == "FALLBACK"
    await bench.clock.advance(RETRY_S)
    bench.routing.tick()
    assert bench.routing.trust()[rank()].state == "EXACT"
    assert [(each.doubt, each.is_over) for each in bench.routing.moves()] == [
        ("underpredicted", False),
        ("underpredicted", True),
    ]
    assert bench.routing.moves() == []
