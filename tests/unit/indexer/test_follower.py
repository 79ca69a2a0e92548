"""The stream's state machine: each row of its table, and what the way may do to batches, heartbeats and answers."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.follower import (
    ApplyEvent,
    AskDump,
    Effect,
    FollowerCounts,
    FollowerLimits,
    ReplaceAll,
    StaleReason,
    StreamFollower,
    is_blind,
)
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.events import TIERS, Batch, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import BlockColumns, DumpChunk, HeldBlock, block_columns, dump_chunks

EPOCH, LATER, THIRD = 11, 22, 33
LIMITS = FollowerLimits(behind_s=2.0, answer_s=2.0, kept_max=4, silent_s=3.0)


class Refused(NamedTuple):
    """Bytes could not be read, or parked blocks were lost."""


class Tick(NamedTuple):
    """Nothing but time."""


Input = Batch | Heartbeat | DumpChunk | Refused | Tick
REFUSED, TICK = Refused(), Tick()


def batch(seq: int, epoch: int = EPOCH) -> Batch:
    return Batch(epoch, seq, Stored((seq,)))


def applied(*seqs: int) -> list[Effect]:
    return [ApplyEvent(Stored((seq,))) for seq in seqs]


def pulse(last_seq: int, epoch: int = EPOCH, *, held: Iterable[int] = (), stale: str = "") -> Heartbeat:
    tiers = (SetDigest(held).of_tier(Tier.GPU),)
    return Heartbeat(instance="i", epoch=epoch, last_seq=last_seq, tiers=tiers, stale=stale)


def rows(*held: int) -> tuple[HeldBlock, ...]:
    return tuple(HeldBlock(block, None, 1) for block in held)


def columns(*held: int, size: int = 99) -> tuple[BlockColumns, ...]:
    return tuple(block_columns(rows(*held), size))


def answer(request_id: int, last_seq: int, *held: int, epoch: int = EPOCH, size: int = 99) -> list[DumpChunk]:
    return dump_chunks(request_id, epoch, last_seq, rows(*held), chunk_blocks=size)


def whole(request_id: int, last_seq: int, *held: int, epoch: int = EPOCH) -> DumpChunk:
    return answer(request_id, last_seq, *held, epoch=epoch)[0]


def holds(*held: int) -> Callable[[Tier], TierDigest]:
    return lambda tier: SetDigest(held if tier is Tier.GPU else ()).of_tier(tier)


def give(
    follower: StreamFollower, one: Input, now_s: float = 0, digest_of: Callable[[Tier], TierDigest] | None = None
) -> list[Effect]:
    match one:
        case Batch():
            return follower.on_batch(one, now_s)
        case Heartbeat():
            return follower.on_heartbeat(one, digest_of or holds(), now_s)
        case DumpChunk():
            return follower.on_chunk(one, now_s)
        case Refused():
            return follower.on_refused(now_s)
        case Tick():
            return follower.tick(now_s)


def after(*inputs: Input, limits: FollowerLimits = LIMITS) -> StreamFollower:
    """Return a follower to which all this came at 0 s."""
    follower = StreamFollower(limits)
    for one in inputs:
        give(follower, one)
    return follower


def counts(follower: StreamFollower) -> FollowerCounts:
    return follower.statistics().counts


# ------------------------------------------------------------------------------------------------- the table

NEW: list[Input] = []
LIVE: list[Input] = [batch(1), batch(2), batch(3)]
PULSED: list[Input] = [pulse(0), *LIVE]
BEHIND: list[Input] = [*LIVE, pulse(4)]
RESYNCING: list[Input] = [*LIVE, batch(6)]
BOTH_EPOCHS: list[Input] = [*PULSED, pulse(0, LATER)]


class Row(NamedTuple):
    name: str
    given: Sequence[Input]
    one: Input
    effects: list[Effect]
    stale: str
    position: tuple[int, int]
    now_s: float = 0


ROWS = [
    Row("NEW, batch 1", NEW, batch(1), applied(1), "", (EPOCH, 1)),
    Row("NEW, batch of the middle", NEW, batch(5), [AskDump(1)], "resyncing", (EPOCH, 0)),
    Row("NEW, heartbeat of an empty stream", NEW, pulse(0), [], "", (EPOCH, 0)),
    Row("NEW, heartbeat of a stream that has begun", NEW, pulse(5), [], "behind", (EPOCH, 0)),
    Row("NEW, time", NEW, TICK, [], "never_heard", (0, 0), 99),
    Row("NEW, an answer to nothing", NEW, whole(1, 5, 7), [], "never_heard", (0, 0)),
    Row("LIVE, batch below the cursor", LIVE, batch(1), [], "", (EPOCH, 3)),
    Row("LIVE, batch at the cursor", LIVE, batch(3), [], "", (EPOCH, 3)),
    Row("LIVE, batch after the cursor", LIVE, batch(4), applied(4), "", (EPOCH, 4)),
    Row("LIVE, gap", LIVE, batch(5), [AskDump(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, heartbeat ahead", LIVE, pulse(4), [], "behind", (EPOCH, 3)),
    Row("LIVE, behind for less than behind_s", BEHIND, TICK, [], "behind", (EPOCH, 3), 1.99),
    Row("LIVE, behind for behind_s", BEHIND, TICK, [AskDump(1)], "resyncing", (EPOCH, 3), 2.0),
    Row("LIVE, behind, then caught up", BEHIND, batch(4), applied(4), "", (EPOCH, 4)),
    Row("LIVE, caught up, then time", [*BEHIND, batch(4)], TICK, [], "", (EPOCH, 4), 99),
    Row("LIVE, equal digests", LIVE, pulse(3), [], "", (EPOCH, 3)),
    Row("LIVE, a mismatch", LIVE, pulse(3, held=[7]), [AskDump(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, a late heartbeat proves nothing", LIVE, pulse(2, held=[7]), [], "", (EPOCH, 3)),
    Row("LIVE, the source does not vouch", LIVE, pulse(3, stale="why"), [], "source", (EPOCH, 3)),
    Row("LIVE, the source vouches again", [*LIVE, pulse(3, stale="why")], pulse(3), [], "", (EPOCH, 3)),
    Row("LIVE, an answer to nothing", LIVE, whole(0, 9), [], "", (EPOCH, 3)),
    Row("RESYNCING, the next batch", RESYNCING, batch(4), [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, a later batch", RESYNCING, batch(7), [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, an old batch", RESYNCING, batch(2), [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, heartbeat ahead", RESYNCING, pulse(9), [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, heartbeat that differs", RESYNCING, pulse(3, held=[7]), [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, dump", RESYNCING, whole(1, 7, 8), [ReplaceAll(columns(8))], "", (EPOCH, 7)),
    Row("RESYNCING, empty dump", RESYNCING, whole(1, 7), [ReplaceAll()], "", (EPOCH, 7)),
    Row("RESYNCING, dump, what follows", RESYNCING, whole(1, 5), [ReplaceAll(), *applied(6)], "", (EPOCH, 6)),
    Row("RESYNCING, dump, a new gap", RESYNCING, whole(1, 4), [ReplaceAll(), AskDump(2)], "resyncing", (EPOCH, 4)),
    Row("RESYNCING, a part of a dump", RESYNCING, answer(1, 7, 8, 9, size=1)[0], [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, another's answer", RESYNCING, whole(2, 7, 8), [], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, patience", RESYNCING, TICK, [], "resyncing", (EPOCH, 3), 1.99),
    Row("RESYNCING, no more patience", RESYNCING, TICK, [AskDump(2)], "resyncing", (EPOCH, 3), 2.0),
    Row("NEW, refused", NEW, REFUSED, [AskDump(1)], "resyncing", (0, 0)),
    Row("LIVE, refused", LIVE, REFUSED, [AskDump(1)], "resyncing", (EPOCH, 3)),
    Row("RESYNCING, refused", RESYNCING, REFUSED, [], "resyncing", (EPOCH, 3)),
    Row("LIVE, heartbeat of another epoch", LIVE, pulse(0, LATER), [ReplaceAll()], "", (LATER, 0)),
    Row("LIVE, heartbeat of one that has begun", LIVE, pulse(2, LATER), [ReplaceAll()], "behind", (LATER, 0)),
    Row("RESYNCING, heartbeat of another epoch", RESYNCING, pulse(0, LATER), [ReplaceAll()], "", (LATER, 0)),
    Row("heartbeat of a retired epoch", BOTH_EPOCHS, pulse(9), [], "", (LATER, 0)),
    Row("LIVE, first batch of another, no pulse", LIVE, batch(1, LATER), [ReplaceAll(), *applied(1)], "", (LATER, 1)),
    Row("LIVE, gap into another", LIVE, batch(2, LATER), [ReplaceAll(), AskDump(1)], "resyncing", (LATER, 0)),
    Row("RESYNCING, first of another", RESYNCING, batch(1, LATER), [ReplaceAll(), *applied(1)], "", (LATER, 1)),
    Row("LIVE, batch of another, pulse heard", PULSED, batch(1, LATER), [], "", (EPOCH, 3)),
    Row("batch of a retired epoch, pulse heard", BOTH_EPOCHS, batch(4), [], "", (LATER, 0)),
    Row("batch of a retired epoch, no pulse", [*LIVE, batch(1, LATER)], batch(4), [], "", (LATER, 1)),
    Row("RESYNCING, dump of another epoch", RESYNCING, whole(1, 7, epoch=LATER), [ReplaceAll()], "", (LATER, 7)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table_holds(row: Row) -> None:
    follower = after(*row.given)
    assert give(follower, row.one, row.now_s) == row.effects
    assert (follower.stale, follower.position) == (row.stale, row.position)


# ------------------------------------------------------------------------------------------------- questions, answers


def test_what_befell_a_stream_is_counted() -> None:
    follower = after(batch(1), batch(1), batch(3), batch(4), whole(1, 3), pulse(4, held=[7]), whole(2, 4))
    give(follower, batch(6))
    give(follower, pulse(0, LATER))
    give(follower, batch(7))
    assert counts(follower) == FollowerCounts(
        applied=2, duplicates=2, gaps=2, resyncs=2, restarts=1, digest_mismatches=1, other_epoch=1
    )
    assert (follower.statistics().epoch, follower.statistics().cursor) == (LATER, 0)


def test_statistics_are_a_copy() -> None:
    follower = after(batch(1))
    before = follower.statistics()
    give(follower, batch(2))
    assert before.counts.applied == 1


def test_only_an_answer_to_the_newest_question_counts() -> None:
    follower = after(*RESYNCING)
    assert give(follower, TICK, 2) == [AskDump(2)]
    assert give(follower, whole(1, 6, 8), 2) == []
    assert give(follower, whole(2, 6, 8), 2) == [ReplaceAll(columns(8))]
    assert give(follower, whole(2, 6, 9), 2) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 0, 2, 2, 1), (1, 1, 1, 0, 2)], ids=str)
def test_the_parts_of_an_answer_come_in_any_order_and_more_than_once(order: tuple[int, ...]) -> None:
    follower, parts = after(*RESYNCING), answer(1, 9, 5, 6, 7, 8, 9, size=2)
    effects = [give(follower, parts[at]) for at in order]
    assert effects[:-1] == [[]] * (len(order) - 1)
    assert effects[-1] == [ReplaceAll(columns(5, 6, 7, 8, 9, size=2))]
    assert follower.position == (EPOCH, 9)


@pytest.mark.parametrize(
    "other", [whole(1, 7, 8), answer(1, 9, 5, 6, size=1)[1], answer(1, 6, 5, 6, 7, 8, epoch=LATER, size=2)[1]]
)
def test_the_parts_of_two_answers_are_never_mixed_and_ask_nothing_by_themselves(other: DumpChunk) -> None:
    first, second = answer(1, 6, 5, 6, 7, 8, size=2)
    follower = after(*RESYNCING, first)
    assert give(follower, other) == []
    assert give(follower, second) == [ReplaceAll(columns(5, 6, 7, 8, size=2))]


def test_an_answer_that_dies_halfway_is_asked_for_again_and_leaves_nothing() -> None:
    follower = after(*RESYNCING, answer(1, 6, 5, 6, size=1)[0])
    assert give(follower, TICK, 2) == [AskDump(2)]
    assert give(follower, answer(2, 6, 5, 6, size=1)[1], 2) == []
    assert give(follower, answer(2, 6, 5, 6, size=1)[0], 2) == [ReplaceAll(columns(5, 6, size=1))]


def test_an_answer_that_still_comes_is_not_asked_for_again() -> None:
    follower, parts = after(*RESYNCING), answer(1, 6, *range(10), size=1)
    for at, part in enumerate(parts[:-1]):
        assert give(follower, part, 1.5 * at) == []
        assert give(follower, TICK, 1.5 * at + 1.4) == []
    assert give(follower, parts[-1], 1.5 * 9) == [ReplaceAll(columns(*range(10), size=1))]


def test_a_doubled_part_buys_no_time() -> None:
    follower, part = after(*RESYNCING), answer(1, 6, 5, 6, size=1)[0]
    for now_s in (0.5, 1.0, 1.5, 2.0, 2.4):
        assert give(follower, part, now_s) == []
    assert give(follower, TICK, 2.5) == [AskDump(2)]


def test_who_is_never_answered_asks_for_ever_but_once_in_answer_s() -> None:
    follower = after(*RESYNCING)
    asked = [now for now in range(1, 101) if give(follower, TICK, now * 0.5)]
    assert asked == list(range(4, 101, 4))


# ------------------------------------------------------------------------------------------------- kept batches


def test_kept_batches_are_applied_in_order_whatever_order_they_came_in() -> None:
    follower = after(*RESYNCING, batch(8), batch(5), batch(7))
    assert give(follower, whole(1, 4, 9)) == [ReplaceAll(columns(9)), *applied(5, 6, 7, 8)]
    assert follower.position == (EPOCH, 8)


def test_a_batch_kept_twice_is_applied_once() -> None:
    follower = after(*RESYNCING, batch(6), batch(6))
    assert give(follower, whole(1, 5)) == [ReplaceAll(), *applied(6)]


def test_the_oldest_kept_batch_gives_way_and_its_loss_is_a_gap() -> None:
    follower = after(*LIVE, *(batch(seq) for seq in range(5, 11)))  # kept: 7, 8, 9, 10
    assert counts(follower).kept_lost == 2
    assert give(follower, whole(1, 4)) == [ReplaceAll(), AskDump(2)]
    assert give(follower, whole(2, 6)) == [ReplaceAll(), *applied(7, 8, 9, 10)]
    assert follower.stale == ""


def test_a_gap_among_the_kept_is_one_more_question_and_what_lies_beyond_is_kept_on() -> None:
    follower = after(*LIVE, batch(5), batch(6), batch(8), batch(9))
    assert give(follower, whole(1, 4)) == [ReplaceAll(), *applied(5, 6), AskDump(2)]
    assert counts(follower).gaps == 2
    assert give(follower, whole(2, 7)) == [ReplaceAll(), *applied(8, 9)]


def test_kept_batches_of_a_former_epoch_are_gone() -> None:
    follower = after(*RESYNCING, batch(7))
    assert give(follower, whole(1, 5, epoch=LATER)) == [ReplaceAll()]
    assert give(follower, batch(6, LATER)) == applied(6)
    follower = after(*RESYNCING, pulse(0, LATER))
    assert give(follower, batch(1, LATER)) == applied(1)


def test_a_dump_that_ends_below_what_a_heartbeat_told_is_behind() -> None:
    follower = after(*RESYNCING, pulse(9))
    assert give(follower, whole(1, 6), 1) == [ReplaceAll()]
    assert follower.stale == "behind"
    assert give(follower, TICK, 2.99) == []
    assert give(follower, TICK, 3.0) == [AskDump(2)]


def test_a_batch_that_the_dump_has_already_is_a_duplicate() -> None:
    follower = after(*RESYNCING, whole(1, 8))
    assert [give(follower, batch(seq)) for seq in (7, 8, 9)] == [[], [], applied(9)]


# ------------------------------------------------------------------------------------------------- behind


def test_a_log_that_lags_less_than_behind_s_is_never_asked_about() -> None:
    follower = after(pulse(0))
    for step in range(1, 200):  # 4 batches and 1 heartbeat each second; the log is 1.5 s late
        now_s = step / 4
        if step % 4 == 0:
            assert give(follower, pulse(step), now_s) == []
        if step > 6:
            assert give(follower, batch(step - 6), now_s) == applied(step - 6)
        assert give(follower, TICK, now_s) == []


def test_a_log_that_stands_still_is_asked_about_though_heartbeats_go_on() -> None:
    follower = after(pulse(0), batch(1))
    asked = []
    for step in range(1, 20):
        asked += [step / 4] * len(give(follower, pulse(1 + step), step / 4) + give(follower, TICK, step / 4))
        if asked:
            break
    assert asked == [0.25 + 2.0]


def test_progress_that_does_not_reach_what_was_told_is_no_excuse() -> None:
    follower = after(pulse(5))
    assert give(follower, batch(1), 1.9) == applied(1)
    assert give(follower, TICK, 2.0) == [AskDump(1)]


def test_behind_and_caught_up_again_needs_no_question() -> None:
    follower = after(*LIVE, pulse(5))
    assert [follower.stale, give(follower, batch(4)), follower.stale] == ["behind", applied(4), "behind"]
    assert [give(follower, batch(5)), follower.stale] == [applied(5), ""]
    assert give(follower, TICK, 99) == []


def test_a_late_heartbeat_does_not_make_behind_what_is_not() -> None:
    follower = after(*LIVE, pulse(2), pulse(1))
    assert (follower.stale, give(follower, TICK, 99)) == ("", [])


@pytest.mark.parametrize("tier", TIERS)
def test_the_digest_of_every_tier_is_compared_and_silence_about_one_means_none(tier: Tier) -> None:
    told = Heartbeat(instance="i", epoch=EPOCH, last_seq=3, tiers=(TierDigest(tier, 1, 5),))
    assert give(after(*LIVE), told, 0, holds()) == [AskDump(1)]
    assert give(after(*LIVE), told, 0, lambda each: TierDigest(each, *((1, 5) if each is tier else (0, 0)))) == []
    silent = Heartbeat(instance="i", epoch=EPOCH, last_seq=3)
    assert give(after(*LIVE), silent, 0, lambda each: TierDigest(each, *((1, 5) if each is tier else (0, 0)))) == [
        AskDump(1)
    ]
    assert give(after(*LIVE), silent) == []


# ------------------------------------------------------------------------------------------------- epochs


def test_a_batch_that_outran_its_epochs_heartbeat_is_had_by_a_dump() -> None:
    follower = after(*PULSED, batch(1, LATER), batch(2, LATER))
    assert give(follower, pulse(2, LATER)) == [ReplaceAll(), AskDump(1)]
    assert give(follower, batch(3, LATER)) == []
    assert give(follower, whole(1, 2, 8, epoch=LATER)) == [ReplaceAll(columns(8)), *applied(3)]
    assert (follower.position, follower.stale) == ((LATER, 3), "")


def test_a_heartbeat_before_its_epochs_first_batch_needs_no_dump() -> None:
    follower = after(*PULSED, pulse(0, LATER))
    assert give(follower, batch(1, LATER)) == applied(1)
    assert give(follower, pulse(1, LATER)) == []


def test_a_restart_ends_the_question_and_its_answer_means_nothing() -> None:
    follower = after(*RESYNCING, pulse(0, LATER))
    assert give(follower, whole(1, 6)) == []
    assert give(follower, whole(1, 0, epoch=LATER)) == []
    assert (follower.position, follower.stale, give(follower, TICK, 99)) == ((LATER, 0), "", [])


def test_a_log_read_from_its_beginning_goes_through_former_epochs_to_the_living_one() -> None:
    follower = StreamFollower(LIMITS)
    effects = [give(follower, batch(seq, epoch)) for epoch, seq in [(EPOCH, 1), (EPOCH, 2), (LATER, 1), (THIRD, 1)]]
    assert effects == [applied(1), applied(2), [ReplaceAll(), *applied(1)], [ReplaceAll(), *applied(1)]]
    assert give(follower, pulse(1, THIRD)) == []
    assert (follower.position, counts(follower).restarts) == ((THIRD, 1), 2)


def test_the_pulse_tells_which_epoch_lives_whatever_the_log_said_last() -> None:
    follower = after(batch(1), batch(1, LATER))
    assert give(follower, pulse(1)) == [ReplaceAll()]
    assert give(follower, batch(2, LATER)) == []
    assert follower.position == (EPOCH, 0)
    assert give(follower, TICK, 2) == [AskDump(1)]
    assert give(follower, whole(1, 1, 8), 2) == [ReplaceAll(columns(8))]


def test_two_lives_that_alternate_in_the_log_do_not_make_the_reader_alternate() -> None:
    follower = after(batch(1), batch(1, LATER), batch(2), batch(2, LATER), batch(3))
    assert (follower.position, counts(follower).restarts) == ((LATER, 2), 1)
    assert give(follower, pulse(2, LATER)) == []
    assert follower.stale == ""


def test_a_dump_too_tells_which_epoch_lives() -> None:
    """A log that begins amid a former epoch: the living one answers before it is first heard to pulse."""
    follower = after(batch(500))
    assert give(follower, whole(1, 7, 8, epoch=LATER)) == [ReplaceAll(columns(8))]
    assert [give(follower, batch(seq)) for seq in (501, 502)] == [[], []]
    assert [give(follower, batch(seq, LATER)) for seq in (6, 7, 8)] == [[], [], applied(8)]
    assert give(follower, pulse(8, LATER)) == []
    assert (follower.position, follower.stale) == ((LATER, 8), "")


def test_the_pulse_of_the_living_epoch_counts_at_once_though_the_log_retired_it() -> None:
    follower = after(batch(1), batch(9, LATER))  # a late batch of a former life, told as if it were a new one
    assert follower.stale == "resyncing"
    assert give(follower, whole(1, 4, 8)) == []
    assert give(follower, pulse(4)) == [ReplaceAll()]
    assert give(follower, TICK, 2) == [AskDump(2)]
    assert give(follower, whole(2, 4, 8), 2) == [ReplaceAll(columns(8))]


def test_an_answer_from_a_retired_epoch_counts_for_nothing() -> None:
    follower = after(*BOTH_EPOCHS, REFUSED)
    assert give(follower, whole(1, 3, 8)) == []
    assert give(follower, whole(1, 0, epoch=LATER)) == [ReplaceAll()]


def test_of_two_lives_that_both_pulse_the_one_heard_of_later_is_followed_and_stays() -> None:
    follower = after(*PULSED)
    for step in range(100):
        give(follower, pulse(step), step)
        give(follower, pulse(0, LATER), step + 0.5)
    assert (follower.position, counts(follower).restarts) == ((LATER, 0), 1)


def test_a_life_that_was_retired_wrongly_is_taken_back_once_the_other_fell_silent() -> None:
    """The former life's last pulse was heard after the living one's first."""
    follower = after(pulse(0, LATER), pulse(3, EPOCH))
    heard = [now_s for now_s in range(1, 20) if give(follower, pulse(0, LATER), now_s)]
    assert heard == [LIMITS.silent_s]
    assert (follower.position, follower.stale) == ((LATER, 0), "")
    assert give(follower, pulse(9, EPOCH), 20) == [], "and the former life is the retired one again"


def test_the_same_after_a_wrong_dump() -> None:
    follower = after(pulse(0, LATER), REFUSED)
    assert give(follower, whole(1, 3, 8)) == [ReplaceAll(columns(8))]
    assert give(follower, pulse(0, LATER), 1) == []
    assert give(follower, pulse(0, LATER), LIMITS.silent_s) == [ReplaceAll()]
    assert follower.position == (LATER, 0)


def test_a_source_that_does_not_vouch_is_forgotten_with_its_epoch() -> None:
    follower = after(pulse(0, stale="why"), pulse(0, LATER))
    assert follower.stale == ""


# ------------------------------------------------------------------------------------------------- overfull


def overfull(*inputs: Input) -> StreamFollower:
    follower = after(*inputs)
    follower.on_memory(is_overfull=True)
    return follower


@pytest.mark.parametrize(
    ("inputs", "stale"),
    [(NEW, "never_heard"), (LIVE, "overfull"), (BEHIND, "overfull"), (RESYNCING, "resyncing")],
)
def test_a_stream_is_overfull_beside_its_state(inputs: Sequence[Input], stale: str) -> None:
    assert overfull(*inputs).stale == stale


def test_while_overfull_a_mismatch_and_lost_parked_blocks_ask_nothing_and_the_rest_is_as_ever() -> None:
    follower = overfull(*LIVE)
    assert [give(follower, pulse(3, held=[7])), follower.on_parked_lost(0), give(follower, TICK, 99)] == [[], [], []]
    assert (counts(follower).digest_mismatches, give(follower, batch(4))) == (0, applied(4))
    assert give(follower, batch(6)) == [AskDump(1)]


def test_what_is_proven_whole_is_not_stale_until_it_is_proven_not_to_be() -> None:
    follower = overfull(*LIVE)
    stale = []
    for told in (pulse(3), pulse(4), pulse(3, held=[7]), pulse(3)):
        give(follower, told)
        stale.append(follower.stale)
    assert stale == ["", "behind", "overfull", "behind"]


def test_a_proof_does_not_outlive_what_it_proved() -> None:
    follower = overfull(*LIVE, pulse(3))
    follower.on_memory(is_overfull=False)
    follower.on_memory(is_overfull=True)
    assert follower.stale == "overfull"


def test_room_again_is_one_question() -> None:
    follower = overfull(*LIVE)
    assert [follower.on_room(0), follower.on_room(0)] == [[AskDump(1)], []]
    follower.on_memory(is_overfull=False)
    assert (give(follower, whole(1, 3, 8)), follower.stale) == ([ReplaceAll(columns(8))], "")


# ------------------------------------------------------------------------------------------------- one in flight

moments = st.floats(0, 0.9)
epochs = st.sampled_from([EPOCH, LATER])
inputs = st.one_of(
    st.builds(batch, st.integers(1, 12), epochs),
    st.builds(pulse, st.integers(0, 12), epochs, held=st.lists(st.just(5), max_size=1)),
    st.builds(lambda request, seq, size, at, epoch: answer(request, seq, 1, 2, 3, epoch=epoch, size=size)[at // size],
              st.integers(1, 6), st.integers(0, 12), st.integers(1, 3), st.integers(0, 2), epochs),
    st.just(REFUSED),
    st.just(TICK),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(moments, inputs), max_size=80))
def test_a_second_question_waits_for_an_answer_a_restart_or_answer_s(script: list[tuple[float, Input]]) -> None:
    follower, now_s, asked_at_s, known = StreamFollower(LIMITS), 0.0, float("-inf"), (0, 0)
    for pause_s, one in script:
        now_s += pause_s
        before = follower.position
        effects = give(follower, one, now_s)
        settled = (counts(follower).resyncs, counts(follower).restarts)
        for effect in effects:
            if isinstance(effect, AskDump):
                assert now_s - asked_at_s >= LIMITS.answer_s or settled != known
                asked_at_s, known = now_s, settled
        assert len([effect for effect in effects if isinstance(effect, AskDump)]) <= 1
        assert (
            follower.position[0] != before[0] or follower.position[1] >= before[1] or ReplaceAll in map(type, effects)
        )


@pytest.mark.parametrize("stale", get_args(StaleReason))
def test_routed_to_blindly_is_who_is_stale_but_for_want_of_memory(stale: StaleReason) -> None:
    assert is_blind(stale) == (stale not in ("", "overfull"))
