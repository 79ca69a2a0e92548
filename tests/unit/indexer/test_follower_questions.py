"""What a stream asks, when, and what it makes of the answers; what it keeps meanwhile."""

from collections.abc import Callable

import msgspec
import pytest

from indexer.follow.follower import AHEAD_MAX
from indexer.follow.question import WHOLE_ANSWER_S
from indexer.follow.received import ReorderBuffer
from kv_protocol.events import Batch, Cleared, Stored
from kv_protocol.recovery import DumpChunk, ReplayChunk
from tests.unit.indexer.stream_inputs import (
    DOUBT,
    EPOCH,
    FAR,
    HOLE,
    LATER,
    LIMITS,
    LIVE,
    PULSED,
    REFUSED,
    TICK,
    Input,
    ReplaceAll,
    Stream,
    after,
    answer,
    applied,
    batch,
    columns,
    counts,
    dump,
    give,
    holds,
    mended,
    overfull,
    pulse,
    repair,
    repaired,
    replay,
    tail,
    whole,
)

U64_MAX = (1 << 64) - 1
PATIENT = msgspec.structs.replace(LIMITS, gap_s=0.5)

# ------------------------------------------------------------------------------------------------- answers


def test_only_an_answer_to_the_newest_question_counts() -> None:
    follower = after(*HOLE)
    assert give(follower, TICK, 2) == [tail(2)]
    assert [give(follower, one, 2) for one in (whole(1, 6, 8), replay(1, 6, 4, 5, 6))] == [[], []]
    assert give(follower, whole(2, 6, 8), 2) == [ReplaceAll(columns(8))]
    assert give(follower, whole(2, 6, 9), 2) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 0, 2, 2, 1), (1, 1, 1, 0, 2)], ids=str)
def test_the_parts_of_a_dump_come_in_any_order_and_more_than_once(order: tuple[int, ...]) -> None:
    follower, parts = after(*HOLE), answer(1, 9, 5, 6, 7, 8, 9, size=2)
    effects = [give(follower, parts[at]) for at in order]
    assert effects[:-1] == [[]] * (len(order) - 1)
    assert effects[-1] == [ReplaceAll(columns(5, 6, 7, 8, 9, size=2))]
    assert follower.position == (EPOCH, 9)


def test_a_question_whose_answer_never_ends_is_asked_anew() -> None:
    follower, parts = after(*HOLE), answer(1, 200, *range(5, 200), size=1)
    asked = [give(follower, part, at) for at, part in enumerate(parts) if at <= WHOLE_ANSWER_S]
    assert asked == [[]] * int(WHOLE_ANSWER_S) + [[tail(2)]]


@pytest.mark.parametrize(
    "other",
    [
        whole(1, 7, 8),
        answer(1, 9, 5, 6, size=1)[1],
        answer(1, 6, 5, 6, 7, 8, epoch=LATER, size=2)[1],
        repaired(1, 6, 5, 6),
    ],
)
def test_the_parts_of_two_answers_are_never_mixed_and_ask_nothing_by_themselves(other: DumpChunk) -> None:
    first, second = answer(1, 6, 5, 6, 7, 8, size=2)
    follower = after(*DOUBT, first)
    assert give(follower, other) == []
    assert give(follower, second) == [ReplaceAll(columns(5, 6, 7, 8, size=2))]


def test_a_replay_that_dies_halfway_is_asked_for_from_where_it_came_to() -> None:
    follower = after(*HOLE, replay(1, 9, 4, 5))
    assert (follower.position, give(follower, TICK, 2)) == ((EPOCH, 6), [tail(2)])
    assert give(follower, replay(2, 9, 7, 8, 9), 2) == applied(7, 8, 9)


@pytest.mark.parametrize(
    "parts", [answer(1, 15, *range(10), size=1), [replay(1, 15, seq) for seq in (4, *range(6, 16))]]
)
def test_an_answer_that_still_comes_is_not_asked_for_again(parts: list[DumpChunk | ReplayChunk]) -> None:
    follower = after(*LIVE, batch(5))
    for at, part in enumerate(parts[:-1]):
        give(follower, part, 1.5 * at)
        assert give(follower, TICK, 1.5 * at + 1.4) == []
    assert give(follower, parts[-1], 1.5 * len(parts)) != []
    assert (follower.position, follower.stale) == ((EPOCH, 15), "")


def test_an_answer_that_cannot_be_right_makes_a_dump_wanted() -> None:
    unreadable = ReplayChunk(request_id=1, epoch=EPOCH, last_seq=9, message=b"\x01")
    for before, wrong in (
        (HOLE, unreadable),
        (HOLE, replay(1, 2)),
        (DOUBT, repaired(1, 3, 1 << 63)),
    ):
        follower = after(*before)
        assert [give(follower, wrong), give(follower, TICK, 2)] == [[], [dump(2)]]


# ------------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize("late", [whole(1, 6, 8), replay(1, 9, 7, 8, 9), replay(1, 6, 4, 5, 6), repaired(1, 6)])
def test_a_late_answer_to_a_hole_that_closed_changes_nothing(late: DumpChunk | ReplayChunk) -> None:
    follower = after(*HOLE, batch(4), batch(5))
    assert (give(follower, late), follower.position, follower.stale) == ([], (EPOCH, 6), "")
    assert give(follower, TICK, 99) == []


def test_what_a_heartbeat_told_of_is_a_hole_until_it_is_there() -> None:
    follower = after(*LIVE, pulse(5))
    assert give(follower, TICK, 2) == [tail(1)]
    assert [give(follower, batch(4), 2), follower.stale] == [applied(4), "resyncing"]
    assert [give(follower, batch(5), 2), follower.stale] == [applied(5), ""]
    assert counts(follower).holes_closed == 1


def test_the_oldest_kept_batch_gives_way_and_its_loss_is_a_hole() -> None:
    follower = after(*DOUBT, *(batch(seq) for seq in range(5, 11)))  # kept: 7, 8, 9, 10
    assert counts(follower).kept_lost == 2
    assert give(follower, repaired(1, 4)) == [mended()]
    assert give(follower, TICK, 2) == [tail(2)]
    assert give(follower, replay(2, 10, 5, 6), 2) == applied(5, 6, 7, 8, 9, 10)
    assert follower.stale == ""


def test_a_hole_among_the_kept_is_one_more_question_and_what_lies_beyond_is_kept_on() -> None:
    follower = after(*HOLE, batch(8), batch(10))
    assert give(follower, whole(1, 7)) == [ReplaceAll(), *applied(8)]
    assert (counts(follower).gaps, give(follower, TICK, 2)) == (2, [tail(2)])
    assert give(follower, replay(2, 10, 9), 2) == applied(9, 10)


def test_a_gap_that_the_log_closes_soon_enough_is_not_requested() -> None:
    follower = after(*HOLE, limits=PATIENT)
    assert [give(follower, TICK, 0.4), follower.stale] == [[], "resyncing"]
    assert give(follower, batch(4), 0.4) == applied(4)
    assert give(follower, batch(5), 0.4) == applied(5, 6)
    assert [give(follower, TICK, 99), follower.stale] == [[], ""]


def test_a_gap_is_requested_once_the_log_has_not_closed_it_for_gap_s() -> None:
    follower = after(*HOLE, limits=PATIENT)
    assert give(follower, TICK, 0.5) == [tail(1)]


def test_a_batch_that_is_lost_is_requested_however_many_later_ones_come() -> None:
    follower = after(*LIVE, limits=PATIENT)
    requested = [give(follower, batch(seq), 0.25 * (seq - 5)) for seq in (5, 6, 7, 8)]
    assert requested == [[], [], [tail(1)], []]


def test_a_place_that_only_an_answer_ends_is_requested_however_the_log_goes_on() -> None:
    follower = after(*LIVE, batch(FAR), limits=PATIENT)
    assert give(follower, batch(4), 0.4) == applied(4)
    assert give(follower, TICK, 0.5) == [tail(1)]


def test_what_a_heartbeat_told_of_has_had_its_time_and_is_requested_at_once() -> None:
    follower = after(*LIVE, pulse(5), limits=PATIENT)
    assert give(follower, TICK, 2) == [tail(1)]


def test_after_an_outage_the_log_has_gap_s_again_to_close_a_gap() -> None:
    follower = after(*HOLE, limits=PATIENT)
    follower.restart_timeouts(10)
    assert [give(follower, TICK, 10.4), give(follower, TICK, 10.5)] == [[], [tail(1)]]


# ------------------------------------------------------------------------------------------------- wanting more


def test_once_more_is_wanted_than_a_tail_the_former_answer_is_void() -> None:
    follower = overfull(*HOLE)
    follower.blocks.memory_bytes = 90
    assert [give(follower, one, 1) for one in (TICK, replay(1, 6, 4, 5, 6), whole(1, 6), batch(4))] == [[]] * 4
    assert give(follower, TICK, 2) == [dump(2)]
    assert give(follower, batch(7), 2) == []
    assert give(follower, whole(2, 6), 2) == [ReplaceAll(), *applied(7)]


def test_a_repair_in_vain_makes_all_wanted() -> None:
    follower, wrong = after(*LIVE), holds(7)
    assert give(follower, pulse(3), 0, wrong) == [repair(1)]
    assert give(follower, repaired(1, 3), 0, wrong) == [mended()]
    assert give(follower, TICK, 2) == [dump(2)]
    assert give(follower, whole(2, 3), 2, wrong) == [ReplaceAll()]
    assert give(follower, TICK, 6) == [repair(3)]
    assert counts(follower).digest_mismatches == 3


def test_a_repair_that_was_proven_is_forgotten() -> None:
    follower, wrong = after(*LIVE), holds(7)
    for second in range(3):
        assert give(follower, pulse(3), second, wrong) == [repair(second + 1)]
        assert give(follower, repaired(second + 1, 3), second, holds()) == [mended()]


def test_a_repair_in_vain_of_a_former_epoch_is_forgotten() -> None:
    follower, wrong = after(*LIVE), holds(7)
    assert give(follower, pulse(3), 0, wrong) == [repair(1)]
    assert give(follower, repaired(1, 3), 0, wrong) == [mended()]
    assert give(follower, pulse(0, LATER), 1, wrong) == [ReplaceAll(), repair(2)]


def test_a_question_that_is_not_true_any_more_makes_all_wanted() -> None:
    follower = overfull(*DOUBT)
    follower.blocks.memory_bytes = 90
    assert [give(follower, one, 1) for one in (TICK, repaired(1, 3))] == [[], []]
    assert give(follower, TICK, 2) == [dump(2)]


# ------------------------------------------------------------------------------------------------- pauses


def asked_at(follower: Stream, until_s: float, *answers: Callable[[int], Input]) -> list[float]:
    """Return when it asks, in ticks of 0.5 s; each question is answered by all of `answers`, as its id makes them."""
    asked = []
    for tick in range(round(until_s * 2) + 1):
        effects = give(follower, TICK, tick / 2)
        if effects:
            asked.append(tick / 2)
            for make in answers:
                give(follower, make(effects[-1].request_id), tick / 2)  # type: ignore[union-attr]
    return asked


def test_a_stream_without_answers_repeats_its_question_ever_less_often() -> None:
    assert asked_at(after(*HOLE), 40) == [2, 6, 14, 22, 30, 38]


def test_answers_that_prove_nothing_are_asked_for_ever_less_often() -> None:
    follower = after(*LIVE)
    follower.on_refused(0.0)

    def answered_and_doubted(request_id: int) -> Input:
        give(follower, repaired(request_id, 3), 0.0)
        return REFUSED

    assert asked_at(follower, 40, answered_and_doubted) == [0, 2, 6, 14, 22, 30, 38]


def test_a_proof_ends_all_pauses() -> None:
    follower = after(*HOLE, whole(1, 6), pulse(6))
    assert give(follower, batch(8)) == [tail(2)]
    follower = after(*HOLE, whole(1, 6))
    assert give(follower, batch(8)) == []


# ------------------------------------------------------------------------------------------------- far away


@pytest.mark.parametrize("seq", [3 + AHEAD_MAX + 1, 1 << 32, U64_MAX])
def test_a_batch_from_far_away_is_not_kept_and_an_answer_says_where_the_stream_is(seq: int) -> None:
    follower = after(*LIVE, batch(seq))
    assert (follower.stale, counts(follower).implausible) == ("resyncing", 1)
    assert give(follower, batch(4)) == applied(4)
    assert [give(follower, replay(1, 4)), follower.stale, follower.position] == [[], "", (EPOCH, 4)]
    assert give(follower, batch(5)) == applied(5)


def test_a_batch_just_near_enough_is_kept() -> None:
    follower = after(*LIVE, batch(3 + AHEAD_MAX))
    assert counts(follower).implausible == 0
    assert give(follower, whole(1, 2 + AHEAD_MAX)) == [ReplaceAll()]


def test_what_a_heartbeat_tells_of_far_away_is_not_waited_for() -> None:
    follower = after(*PULSED, pulse(U64_MAX))
    assert give(follower, replay(1, 3)) == []
    assert (follower.stale, counts(follower).implausible) == ("", 1)
    assert [give(follower, batch(4), 1), give(follower, pulse(4), 1), give(follower, TICK, 99)] == [applied(4), [], []]


def test_a_stream_that_is_really_far_away_is_had_by_an_answer() -> None:
    follower = after(pulse(FAR))
    assert counts(follower).implausible == 0, "nothing was known of its place"
    assert give(follower, whole(1, FAR, 8)) == [ReplaceAll(columns(8))]
    assert give(follower, batch(FAR + 1)) == applied(FAR + 1)
    follower = after(*LIVE, batch(FAR), whole(1, U64_MAX, 8))
    assert (follower.position, follower.stale) == ((EPOCH, U64_MAX), "")


def test_what_was_told_before_a_question_and_lies_beyond_its_answer_was_not_true() -> None:
    follower = after(*LIVE)
    give(follower, pulse(50), 0)
    give(follower, batch(1000), 1)
    assert give(follower, whole(1, 7), 1) == [ReplaceAll()]
    assert (follower.stale, counts(follower).implausible) == ("", 1)
    assert give(follower, TICK, 99) == []


def test_a_place_beyond_its_source_is_given_up_once_no_heartbeat_can_be_that_late() -> None:
    follower = after(*HOLE, whole(1, 9))
    stale = []
    for now_s, last_seq in ((1.0, 6), (2.0, 6), (2.9, 7), (3.0, 7)):
        give(follower, pulse(last_seq), now_s)
        stale.append(follower.stale)
    assert stale == ["", "", "", "resyncing"]
    assert give(follower, TICK, 3.0) == []
    assert give(follower, whole(2, 7, 8), 3.0) == [ReplaceAll(columns(8))]
    assert give(follower, batch(8), 3.0) == applied(8)


def test_a_heartbeat_that_is_always_a_little_late_is_no_sign_of_that() -> None:
    follower = after(pulse(0))
    for seq in range(1, 100):
        give(follower, batch(seq), seq / 4)
        assert give(follower, pulse(max(0, seq - 7)), seq / 4) == []


# ------------------------------------------------------------------------------------------------- time to heal


def test_a_stream_that_is_but_behind_for_a_while_is_not_counted() -> None:
    follower = after(*LIVE, pulse(4), batch(4))
    assert counts(follower).heals == 0


def blocks(count: int) -> Stored:
    return Stored(tuple(range(1, count + 1)))


def test_the_oldest_give_way_to_the_batches_that_are_too_many() -> None:
    kept = ReorderBuffer(2, 99)
    assert [kept.keep(Batch(7, seq, Cleared()), 0) for seq in (3, 2, 4, 5)] == [0, 0, 1, 1]
    assert [batch.seq for batch in kept.following(3)] == [4, 5]


def test_the_oldest_give_way_to_the_blocks_that_are_too_many() -> None:
    kept = ReorderBuffer(99, 10)
    lost = [kept.keep(Batch(7, seq, blocks(count)), 0) for seq, count in ((2, 4), (3, 4), (4, 1), (5, 6), (6, 3))]
    assert lost == [0, 0, 0, 2, 0]
    assert [batch.seq for batch in kept.following(3)] == [4, 5, 6]


def test_the_last_is_kept_however_large() -> None:
    kept = ReorderBuffer(99, 10)
    assert [kept.keep(Batch(7, seq, blocks(count)), 0) for seq, count in ((2, 4), (3, 40))] == [0, 1]
    assert [batch.seq for batch in kept.following(2)] == [3]


def test_what_comes_again_or_goes_makes_room() -> None:
    kept = ReorderBuffer(99, 10)
    assert [kept.keep(Batch(7, 2, blocks(6)), 0) for _ in range(3)] == [0, 0, 0]
    assert kept.drop_up_to(2) == 1
    assert kept.keep(Batch(7, 3, blocks(6)), 0) == 0
    assert [batch.seq for batch in kept.following(2)] == [3]
    assert kept.keep(Batch(7, 5, blocks(6)), 0) == 0
    kept.clear()
    assert kept.keep(Batch(7, 6, blocks(10)), 0) == 0
    assert len(kept) == 1
