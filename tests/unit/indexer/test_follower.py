"""The stream's state machine: each row of its table, and what the way may do to batches and heartbeats."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.follow.status import StaleReason, is_blind, without_log
from kv_protocol.digest import TierDigest
from kv_protocol.events import TIERS, Tier
from kv_protocol.fleet import Heartbeat
from tests.support.amount import examples
from tests.unit.indexer.stream_inputs import (
    BEHIND,
    BOTH_EPOCHS,
    DOUBT,
    EPOCH,
    FAR,
    HOLE,
    LATER,
    LIMITS,
    LIVE,
    NEW,
    PULSED,
    REFUSED,
    THIRD,
    TICK,
    Effect,
    Input,
    OpenQuestion,
    RepairBuckets,
    ReplaceAll,
    Stream,
    after,
    answer,
    applied,
    batch,
    begun,
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

# ------------------------------------------------------------------------------------------------- the table


class Row(NamedTuple):
    name: str
    given: Sequence[Input]
    one: Input
    effects: Sequence[Effect | OpenQuestion]
    stale: str
    position: tuple[int, int]
    now_s: float = 0


ROWS = [
    Row("NEW, batch 1", NEW, batch(1), applied(1), "", (EPOCH, 1)),
    Row("NEW, batch of the middle", NEW, batch(5), [tail(1)], "resyncing", (EPOCH, 0)),
    Row("NEW, batch of a stream that is far", NEW, batch(FAR), [tail(1)], "resyncing", (EPOCH, 0)),
    Row("NEW, heartbeat of an empty stream", NEW, pulse(0), [], "", (EPOCH, 0)),
    Row("NEW, heartbeat of a stream that has begun", NEW, pulse(5), [], "behind", (EPOCH, 0)),
    Row("NEW, heartbeat of a stream that is far", NEW, pulse(FAR), [tail(1)], "resyncing", (EPOCH, 0)),
    Row("NEW, refused", NEW, REFUSED, [dump(1)], "resyncing", (0, 0)),
    Row("NEW, time", NEW, TICK, [], "never_heard", (0, 0), 99),
    Row("NEW, an answer to nothing", NEW, whole(1, 5, 7), [], "never_heard", (0, 0)),
    Row("asked without a place, a batch", [REFUSED], batch(1), applied(1), "", (EPOCH, 1)),
    Row("asked without a place, dump", [REFUSED], whole(1, 5, 7), [ReplaceAll(columns(7))], "", (EPOCH, 5)),
    Row("LIVE, batch below the cursor", LIVE, batch(1), [], "", (EPOCH, 3)),
    Row("LIVE, batch at the cursor", LIVE, batch(3), [], "", (EPOCH, 3)),
    Row("LIVE, batch after the cursor", LIVE, batch(4), applied(4), "", (EPOCH, 4)),
    Row("LIVE, gap", LIVE, batch(5), [tail(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, batch from far away", LIVE, batch(FAR), [tail(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, heartbeat ahead", LIVE, pulse(4), [], "behind", (EPOCH, 3)),
    Row("LIVE, heartbeat from far away", LIVE, pulse(FAR), [tail(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, behind for less than behind_s", BEHIND, TICK, [], "behind", (EPOCH, 3), 1.99),
    Row("LIVE, behind for behind_s", BEHIND, TICK, [tail(1)], "resyncing", (EPOCH, 3), 2.0),
    Row("LIVE, behind, then caught up", BEHIND, batch(4), applied(4), "", (EPOCH, 4)),
    Row("LIVE, caught up, then time", [*BEHIND, batch(4)], TICK, [], "", (EPOCH, 4), 99),
    Row("LIVE, equal digests", LIVE, pulse(3), [], "", (EPOCH, 3)),
    Row("LIVE, a mismatch", LIVE, pulse(3, held=[7]), [repair(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, a late heartbeat proves nothing", LIVE, pulse(2, held=[7]), [], "", (EPOCH, 3)),
    Row("LIVE, the source does not vouch", LIVE, pulse(3, stale="why"), [], "source", (EPOCH, 3)),
    Row("LIVE, the source vouches again", [*LIVE, pulse(3, stale="why")], pulse(3), [], "", (EPOCH, 3)),
    Row("LIVE, refused", LIVE, REFUSED, [repair(1)], "resyncing", (EPOCH, 3)),
    Row("LIVE, an answer to nothing", LIVE, whole(0, 9), [], "", (EPOCH, 3)),
    Row("HOLE, the next batch", HOLE, batch(4), applied(4), "resyncing", (EPOCH, 4)),
    Row("HOLE, the last one missing", [*HOLE, batch(4)], batch(5), applied(5, 6), "", (EPOCH, 6)),
    Row("HOLE, a later batch", HOLE, batch(7), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, an old batch", HOLE, batch(2), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, batch from far away", HOLE, batch(FAR), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, heartbeat ahead", HOLE, pulse(9), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, heartbeat that differs", HOLE, pulse(3, held=[7]), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, refused", HOLE, REFUSED, [], "resyncing", (EPOCH, 3)),
    Row("HOLE, replay", HOLE, replay(1, 7, 4, 5, 6, 7), applied(4, 5, 6, 7), "", (EPOCH, 7)),
    Row("HOLE, replay that meets what is kept", HOLE, replay(1, 6, 4, 5), applied(4, 5, 6), "", (EPOCH, 6)),
    Row("HOLE, a part of a replay", HOLE, replay(1, 9, 4, 5), applied(4, 5, 6), "resyncing", (EPOCH, 6)),
    Row("HOLE, nothing to replay", BEHIND, replay(1, 3), [], "behind", (EPOCH, 3)),
    Row("HOLE, dump", HOLE, whole(1, 7, 8), [ReplaceAll(columns(8))], "", (EPOCH, 7)),
    Row("HOLE, empty dump", HOLE, whole(1, 7), [ReplaceAll()], "", (EPOCH, 7)),
    Row("HOLE, dump, what follows", [*HOLE, batch(7)], whole(1, 6), [ReplaceAll(), *applied(7)], "", (EPOCH, 7)),
    Row("HOLE, dump, a new gap", [*HOLE, batch(9)], whole(1, 7), [ReplaceAll()], "resyncing", (EPOCH, 7)),
    Row("HOLE, a part of a dump", HOLE, answer(1, 7, 8, 9, size=1)[0], [], "resyncing", (EPOCH, 3)),
    Row("HOLE, another's answer", HOLE, whole(2, 7, 8), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, a repair that was not asked for", HOLE, repaired(1, 7, 8), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, replay of another epoch", HOLE, replay(1, 7, 4, epoch=LATER), [], "resyncing", (EPOCH, 3)),
    Row("HOLE, the log was faster than the dump", [*HOLE, batch(4)], whole(1, 3, 8), [], "", (EPOCH, 4)),
    Row("HOLE, patience", HOLE, TICK, [], "resyncing", (EPOCH, 3), 1.99),
    Row("HOLE, no more patience", HOLE, TICK, [tail(2)], "resyncing", (EPOCH, 3), 2.0),
    Row("DOUBT, the next batch", DOUBT, batch(4), [], "resyncing", (EPOCH, 3)),
    Row("DOUBT, refused", DOUBT, REFUSED, [], "resyncing", (EPOCH, 3)),
    Row("DOUBT, repair", DOUBT, repaired(1, 3, 8), [mended(8)], "", (EPOCH, 3)),
    Row("DOUBT, repair, what follows", [*DOUBT, batch(6)], repaired(1, 5), [mended(), *applied(6)], "", (EPOCH, 6)),
    Row("DOUBT, dump", DOUBT, whole(1, 5, 8), [ReplaceAll(columns(8))], "", (EPOCH, 5)),
    Row("DOUBT, replay", DOUBT, replay(1, 4, 4), [], "resyncing", (EPOCH, 3)),
    Row("DOUBT, repair of another epoch", DOUBT, repaired(1, 3, epoch=LATER), [], "resyncing", (EPOCH, 3)),
    Row("DOUBT, repair beyond its buckets", DOUBT, repaired(1, 3, 1 << 63), [], "resyncing", (EPOCH, 3)),
    Row("DOUBT, no more patience", DOUBT, TICK, [repair(2)], "resyncing", (EPOCH, 3), 2.0),
    Row("LIVE, heartbeat of another epoch", LIVE, pulse(0, LATER), [ReplaceAll()], "", (LATER, 0)),
    Row("LIVE, heartbeat of one that has begun", LIVE, pulse(2, LATER), [ReplaceAll()], "behind", (LATER, 0)),
    Row("HOLE, heartbeat of another epoch", HOLE, pulse(0, LATER), [ReplaceAll()], "", (LATER, 0)),
    Row("DOUBT, heartbeat of another epoch", DOUBT, pulse(0, LATER), [ReplaceAll()], "", (LATER, 0)),
    Row("heartbeat of a retired epoch", BOTH_EPOCHS, pulse(9), [], "", (LATER, 0)),
    Row("LIVE, first batch of another, no pulse", LIVE, batch(1, LATER), [ReplaceAll(), *applied(1)], "", (LATER, 1)),
    Row("LIVE, gap into another", LIVE, batch(2, LATER), [ReplaceAll(), tail(1)], "resyncing", (LATER, 0)),
    Row("HOLE, first of another", HOLE, batch(1, LATER), [ReplaceAll(), *applied(1)], "", (LATER, 1)),
    Row("LIVE, batch of another, pulse heard", PULSED, batch(1, LATER), [], "", (EPOCH, 3)),
    Row("batch of a retired epoch, pulse heard", BOTH_EPOCHS, batch(4), [], "", (LATER, 0)),
    Row("batch of a retired epoch, no pulse", [*LIVE, batch(1, LATER)], batch(4), [], "", (LATER, 1)),
    Row("HOLE, dump of another epoch", HOLE, whole(1, 7, epoch=LATER), [ReplaceAll()] * 2, "", (LATER, 7)),
    Row("DOUBT, dump of another epoch", DOUBT, whole(1, 7, epoch=LATER), [ReplaceAll()] * 2, "", (LATER, 7)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table_holds(row: Row) -> None:
    follower = after(*row.given)
    assert give(follower, row.one, row.now_s) == row.effects
    assert (follower.stale, follower.position) == (row.stale, row.position)


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
    assert give(follower, TICK, 2.0) == [tail(1)]


# ------------------------------------------------------------------------------------------------- proofs


@pytest.mark.parametrize("tier", TIERS)
def test_the_digest_of_every_tier_is_compared_and_silence_about_one_means_none(tier: Tier) -> None:
    told = Heartbeat(instance="i", epoch=EPOCH, last_seq=3, tiers=(TierDigest(tier, 1, 5),))
    assert give(after(*LIVE), told, 0, holds()) == [repair(1)]
    assert give(after(*LIVE), told, 0, lambda each: TierDigest(each, *((1, 5) if each is tier else (0, 0)))) == []
    silent = Heartbeat(instance="i", epoch=EPOCH, last_seq=3)
    assert give(after(*LIVE), silent, 0, lambda each: TierDigest(each, *((1, 5) if each is tier else (0, 0)))) == [
        repair(1)
    ]
    assert give(after(*LIVE), silent) == []


def test_a_heartbeat_that_outran_its_batches_is_compared_when_they_came() -> None:
    follower = after(*LIVE)
    assert give(follower, pulse(5, held=[7])) == []
    assert give(follower, batch(4)) == applied(4)
    assert give(follower, batch(5)) == [*applied(5), repair(1)]
    assert counts(follower).digest_mismatches == 1


def test_a_place_that_was_passed_at_once_is_not_compared() -> None:
    follower = after(*HOLE, pulse(4, held=[7]))
    assert give(follower, replay(1, 6, 4, 5)) == applied(4, 5, 6)
    assert (follower.stale, counts(follower).digest_mismatches) == ("", 0)


# ------------------------------------------------------------------------------------------------- epochs


def test_a_batch_that_outran_its_epochs_heartbeat_is_had_by_a_dump() -> None:
    follower = after(*PULSED, batch(1, LATER), batch(2, LATER))
    assert give(follower, pulse(2, LATER)) == [ReplaceAll(), dump(1)]
    assert give(follower, batch(3, LATER)) == []
    assert give(follower, whole(1, 2, 8, epoch=LATER)) == [ReplaceAll(columns(8)), *applied(3)]
    assert (follower.position, follower.stale) == ((LATER, 3), "")


def test_a_heartbeat_before_its_epochs_first_batch_needs_no_dump() -> None:
    follower = after(*PULSED, pulse(0, LATER))
    assert give(follower, batch(1, LATER)) == applied(1)
    assert give(follower, pulse(1, LATER)) == []


@pytest.mark.parametrize("before", [HOLE, DOUBT])
def test_a_restart_ends_the_question_and_its_answer_means_nothing(before: Sequence[Input]) -> None:
    follower = after(*before, pulse(0, LATER))
    late: list[Input] = [whole(1, 6), repaired(1, 6, 7), replay(1, 6, 4, 5, 6), whole(1, 0, epoch=LATER)]
    assert [give(follower, one) for one in late] == [[]] * 4
    assert (follower.position, follower.stale, give(follower, TICK, 99)) == ((LATER, 0), "", [])


def test_a_log_read_from_its_beginning_goes_through_former_epochs_to_the_living_one() -> None:
    follower = Stream()
    effects = [give(follower, batch(seq, epoch)) for epoch, seq in [(EPOCH, 1), (EPOCH, 2), (LATER, 1), (THIRD, 1)]]
    assert effects == [applied(1), applied(2), [ReplaceAll(), *applied(1)], [ReplaceAll(), *applied(1)]]
    assert give(follower, pulse(1, THIRD)) == []
    assert (follower.position, counts(follower).restarts) == ((THIRD, 1), 2)


def test_the_pulse_tells_which_epoch_lives_whatever_the_log_said_last() -> None:
    follower = after(batch(1), batch(1, LATER))
    assert give(follower, pulse(1)) == [ReplaceAll()]
    assert give(follower, batch(2, LATER)) == []
    assert follower.position == (EPOCH, 0)
    assert give(follower, TICK, 2) == [tail(1)]
    assert give(follower, whole(1, 1, 8), 2) == [ReplaceAll(columns(8))]


def test_two_lives_that_alternate_in_the_log_do_not_make_the_reader_alternate() -> None:
    follower = after(batch(1), batch(1, LATER), batch(2), batch(2, LATER), batch(3))
    assert (follower.position, counts(follower).restarts) == ((LATER, 2), 1)
    assert give(follower, pulse(2, LATER)) == []
    assert follower.stale == ""


def test_a_dump_too_tells_which_epoch_lives() -> None:
    """A log that begins amid a former epoch: the living one answers before it is first heard to pulse."""
    follower = after(batch(500))
    assert give(follower, whole(1, 7, 8, epoch=LATER)) == [ReplaceAll(), ReplaceAll(columns(8))]
    assert [give(follower, batch(seq)) for seq in (501, 502)] == [[], []]
    assert [give(follower, batch(seq, LATER)) for seq in (6, 7, 8)] == [[], [], applied(8)]
    assert give(follower, pulse(8, LATER)) == []
    assert (follower.position, follower.stale) == ((LATER, 8), "")


def test_the_pulse_of_the_living_epoch_counts_at_once_though_the_log_retired_it() -> None:
    follower = after(batch(1), batch(9, LATER))  # a late batch of a former life, told as if it were a new one
    assert follower.stale == "resyncing"
    assert give(follower, whole(1, 4, 8)) == []
    assert give(follower, pulse(4)) == [ReplaceAll()]
    assert give(follower, TICK, 2) == [tail(2)]
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


def test_a_source_that_does_not_vouch_is_forgotten_with_its_epoch() -> None:
    follower = after(pulse(0, stale="why"), pulse(0, LATER))
    assert follower.stale == ""


# ------------------------------------------------------------------------------------------------- the log's own place


def test_a_replay_is_not_the_log() -> None:
    follower = after(*HOLE)
    give(follower, replay(1, 8, 4, 5, 6, 7, 8))
    assert (follower.statistics().logged_seq, follower.is_off_log) == (6, True)


def test_a_stream_may_begin_at_a_place_of_which_nothing_is_proven() -> None:
    follower = Stream()
    follower.begin_at(EPOCH, 7, 5)
    assert (follower.position, follower.stale, follower.is_off_log) == ((EPOCH, 7), "", True)
    assert [give(follower, batch(seq)) for seq in (6, 7, 8)] == [[], [], applied(8)]
    follower = Stream()
    follower.begin_at(EPOCH, 7, 7)
    assert give(follower, batch(1, LATER)) == [ReplaceAll(), *applied(1)]


# ------------------------------------------------------------------------------------------------- overfull


@pytest.mark.parametrize(
    ("inputs", "stale"),
    [(NEW, "never_heard"), (LIVE, "overfull"), (BEHIND, "overfull"), (HOLE, "resyncing"), (DOUBT, "resyncing")],
)
def test_a_stream_is_overfull_beside_its_state(inputs: Sequence[Input], stale: str) -> None:
    assert overfull(*inputs).stale == stale


def test_while_overfull_a_mismatch_asks_nothing_and_the_rest_is_as_ever() -> None:
    follower = overfull(*LIVE)
    assert [give(follower, pulse(3, held=[7])), give(follower, TICK, 99)] == [[], []]
    assert (counts(follower).digest_mismatches, give(follower, batch(4))) == (0, applied(4))
    assert give(follower, batch(6)) == [tail(1)]


def test_what_is_proven_whole_is_not_overfull_until_more_is_refused() -> None:
    follower, stale = overfull(*LIVE), list[str]()
    for one, refused_blocks in ((pulse(3), 0), (batch(4), 1)):
        follower.blocks.refuses = refused_blocks
        give(follower, one)
        stale.append(follower.stale)
    assert stale == ["", "overfull"]


@pytest.mark.parametrize(
    ("before", "one"), [(LIVE, batch(4)), (HOLE, whole(1, 7, 8)), (DOUBT, repaired(1, 3, 8)), (LIVE, pulse(9, LATER))]
)
def test_after_each_change_a_stream_is_overfull_if_blocks_were_refused(before: Sequence[Input], one: Input) -> None:
    follower = after(*before)
    follower.blocks.refuses = 1
    give(follower, one)
    assert (follower.full_at is not None) == (not isinstance(one, Heartbeat))


@pytest.mark.parametrize(("before", "one"), [(HOLE, whole(1, 7, 8)), (LIVE, pulse(0, LATER))])
def test_a_stream_whose_blocks_are_replaced_is_not_overfull_any_more(before: Sequence[Input], one: Input) -> None:
    follower = overfull(*before)
    give(follower, one)
    assert follower.stale == ""


@pytest.mark.parametrize("before", [LIVE, HOLE, DOUBT])
def test_room_again_is_one_question_for_all(before: Sequence[Input]) -> None:
    follower = overfull(*before)
    follower.blocks.memory_bytes = 90
    asked = give(follower, TICK, 2)
    assert [asked, give(follower, TICK, 2)] == [[dump(begun(follower, 2).request_id - 1)], []]


# ------------------------------------------------------------------------------------------------- one in flight

moments = st.floats(0, 0.9)
epochs = st.sampled_from([EPOCH, LATER])
seqs = st.integers(0, 12) | st.sampled_from([FAR, (1 << 64) - 1])
numbers = st.integers(1, 6)
inputs = st.one_of(
    st.builds(lambda seq, epoch: batch(max(1, seq), epoch), seqs, epochs),
    st.builds(pulse, seqs, epochs, held=st.lists(st.just(5), max_size=1)),
    st.builds(lambda request, seq, size, at, epoch: answer(request, seq, 1, 2, 3, epoch=epoch, size=size)[at // size],
              numbers, seqs, st.integers(1, 3), st.integers(0, 2), epochs),
    st.builds(lambda request, seq, epoch: repaired(request, seq, 1, epoch=epoch), numbers, seqs, epochs),
    st.builds(lambda request, seq, first, epoch: replay(request, seq, first, first + 1, epoch=epoch),
              numbers, seqs, st.integers(1, 12), epochs),
    st.sampled_from([REFUSED, TICK]),
)  # fmt: skip


@settings(max_examples=examples(500))
@given(st.lists(st.tuples(moments, inputs), max_size=80))
def test_a_second_question_waits_for_answer_s_a_proof_or_a_restart(script: list[tuple[float, Input]]) -> None:
    follower, now_s, asked_at_s, compared = Stream(), 0.0, float("-inf"), list[Tier]()

    def digest_of(tier: Tier) -> TierDigest:
        compared.append(tier)
        return holds()(tier)

    for pause_s, one in script:
        now_s += pause_s
        compared.clear()
        before = follower.position
        effects = give(follower, one, now_s, digest_of)
        is_proven = bool(compared) and follower.question.wants is None
        if is_proven or follower.position[0] != before[0]:
            asked_at_s = float("-inf")
        if any(isinstance(effect, OpenQuestion) for effect in effects):
            assert now_s - asked_at_s >= LIMITS.answer_s
            asked_at_s = now_s
        if follower.position[0] == before[0] and follower.position[1] < before[1]:
            assert isinstance(effects[0], ReplaceAll | RepairBuckets)


@pytest.mark.parametrize("stale", get_args(StaleReason))
def test_a_rank_is_routed_to_blindly_if_stale_except_for_lack_of_memory_or_log(stale: StaleReason) -> None:
    assert is_blind(stale) == (stale not in ("", "overfull", "log_away"))
    assert without_log(stale) == ("log_away" if stale in ("", "behind") else stale)
