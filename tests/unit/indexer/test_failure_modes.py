"""What went wrong in the field elsewhere, by the numbers of a list that this project keeps: the index's share of it.

Each test begins with its number. Those of engines and agents are with the agent; what a network does to all of it
together is in `tests/simulation/`.
"""

from random import Random

import msgspec
import pytest

from indexer.follow.checkpoint import decode_checkpoint, encode_checkpoint
from indexer.follow.fold import IndexFold
from indexer.follow.follower import FollowerLimits
from indexer.follow.inputs import (
    AnswerArrived,
    BytesRefused,
    Fact,
    HeartbeatArrived,
    MessageArrived,
    Question,
    WorkerCame,
    WorkerGone,
)
from indexer.follow.messages import read_message
from indexer.follow.question_turns import RECOVERIES_MAX
from indexer.index.reference import ReferenceIndex
from kv_protocol import codec
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock, ReplayChunk
from kv_protocol.splitmix import splitmix64
from tests.contract.indexes import IMPLEMENTATIONS, MakeIndex
from tests.dumped import dump_chunks
from tests.unit.indexer.life import Life
from tests.unit.indexer.shared_fold import fold_of

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
EPOCH, LATER = 7, 8
PATH = tuple(splitmix64(at) for at in range(8))
FAR_SEQS = [1 << 21, 1 << 32, 1 << 63, (1 << 64) - 1]

make_index: MakeIndex = ReferenceIndex


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test be of each index."""
    monkeypatch.setitem(globals(), "make_index", IMPLEMENTATIONS[request.param])


@pytest.fixture
def fold() -> IndexFold:
    return fold_of(make_index(parked_blocks_max=100, parked_ttl_s=4.0), FollowerLimits(gap_s=0.0))


def told(fold: IndexFold, *facts: Fact, now_s: float = 0) -> list[Question]:
    return [question for fact in facts for question in fold.apply(fact, now_s)]


def arrived(rank: WorkerRank, *batches: Batch) -> MessageArrived:
    return MessageArrived(rank, read_message(codec.encode_message(batches)))


def event(rank: WorkerRank, seq: int, what: Event, epoch: int = EPOCH) -> MessageArrived:
    return arrived(rank, Batch(epoch, seq, what))


def path(first: int = 0, last: int = len(PATH), tier: Tier = Tier.GPU) -> Stored:
    return Stored(PATH[first:last], PATH[first - 1] if first else None, first, tier)


def pulse(rank: WorkerRank, last_seq: int, *held: int, epoch: int = EPOCH, stale: str = "") -> HeartbeatArrived:
    tiers = (SetDigest(held).of_tier(Tier.GPU),)
    return HeartbeatArrived(rank, Heartbeat(instance="i", epoch=epoch, last_seq=last_seq, tiers=tiers, stale=stale))


def all_of(question: Question, last_seq: int, *held: int, epoch: int = EPOCH) -> AnswerArrived:
    rows = [HeldBlock(block, parent, 1) for parent, block in zip((None, *held), held, strict=False)]
    (chunk,) = dump_chunks(question.request.request_id, epoch, last_seq, rows)
    return AnswerArrived(question.rank, chunk)


def known(fold: IndexFold, rank: WorkerRank = A0) -> tuple[int, int, str]:
    """Return how many blocks of the path it has, its place, and what is wrong."""
    (view,) = fold.overlap(PATH, [rank])
    return view.overlap_blocks[0], view.seq, view.stale


def test_03_a_store_whose_parent_was_never_heard_of_is_no_root_and_takes_no_suffix_down(fold: IndexFold) -> None:
    (question,) = told(fold, event(A0, 5, path(2, 4)), event(A0, 6, path(4, 8)))
    assert known(fold) == (0, 0, "resyncing")
    assert told(fold, all_of(question, 6, *PATH), pulse(A0, 6, *PATH)) == []
    assert known(fold) == (8, 6, "")


def test_03_a_suffix_whose_parent_comes_too_late_is_asked_for(fold: IndexFold) -> None:
    told(fold, event(A0, 1, path(2, 4)), event(A0, 2, path(4, 8)))
    assert (known(fold), fold.held(A0)) == ((0, 2, ""), [])
    (question,) = [each for now_s in (1.0, 2.0, 3.0, 4.0) for each in fold.tick(now_s)]
    assert len(question.request.buckets) > 0
    told(fold, all_of(question, 2, *PATH), pulse(A0, 2, *PATH), now_s=4.1)
    assert known(fold) == (8, 2, "")


def test_04_a_reader_that_begins_anew_has_what_it_had_and_goes_on_from_there(fold: IndexFold) -> None:
    life = Life(A0, Random(4))
    told(fold, life.beat(), *(arrived(A0, life.batch()) for _ in range(30)))
    saved = encode_checkpoint(fold.checkpoint("created", 30, 0))
    again = IndexFold(make_index())
    again.restore(decode_checkpoint(saved), 100.0)
    assert set(again.held(A0)) == set(life.rows())
    assert told(again, arrived(A0, life.batch()), life.beat(), now_s=100.0) == []
    assert (set(again.held(A0)), again.statistics().streams[A0].counts.gaps) == (set(life.rows()), 0)


def test_05_the_place_after_a_dump_is_that_of_the_stream_so_that_one_dump_is_enough(fold: IndexFold) -> None:
    (question,) = told(fold, event(A0, 1000, path(0, 2)))
    told(fold, all_of(question, 1000, *PATH[:2]))
    questions = [
        each
        for step in range(60)
        for each in [
            *told(fold, event(A0, 1001 + step, path(step % 6, step % 6 + 1)), now_s=step),
            *told(fold, pulse(A0, 1001 + step, *PATH[: max(2, min(step, 5) + 1)]), now_s=step),
            *fold.tick(step),
        ]
    ]
    assert (questions, known(fold)) == ([], (6, 1060, ""))


def test_06_a_new_registration_begins_at_its_own_first_batch_not_at_a_former_watermark(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), *(event(A0, seq, path(0, seq)) for seq in range(1, 9)), WorkerGone("a"))
    assert known(fold) == (0, 0, "never_heard")
    told(fold, WorkerCame("a", 100), pulse(A0, 0, epoch=LATER), event(A0, 1, path(0, 3), LATER))
    assert (known(fold), fold.statistics().streams[A0].counts.duplicates) == ((3, 1, ""), 0)


def test_06_the_same_without_a_word_of_leaving(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), *(event(A0, seq, path(0, seq)) for seq in range(1, 9)))
    told(fold, pulse(A0, 0, epoch=LATER), event(A0, 1, path(0, 3), LATER))
    assert known(fold) == (3, 1, "")


def test_07_the_recovery_of_the_dead_holds_up_no_living_one(fold: IndexFold) -> None:
    """Sixteen dead ones were asked before it; it is asked after their patience, and they are forgotten."""
    dead = [WorkerRank(f"dead-{at}", 0) for at in range(RECOVERIES_MAX)]
    told(fold, *(event(rank, 5, path()) for rank in dead))
    assert told(fold, pulse(A0, 3), event(A0, 5, path())) == []
    asked_s = None
    for quarter in range(1, 30):
        now_s = quarter / 4
        questions = [*told(fold, pulse(A0, 5, *PATH), now_s=now_s), *fold.tick(now_s)]
        for question in questions:
            if question.rank == A0 and asked_s is None:
                asked_s = now_s
                told(fold, all_of(question, 5, *PATH), now_s=now_s)
    assert (asked_s, known(fold), fold.ranks()) == (2.0, (8, 5, ""), [A0])


def test_07_a_worker_that_returns_with_its_former_seqs_is_a_new_epoch(fold: IndexFold) -> None:
    """The last rank goes, and comes back at the same seqs: only the epoch tells."""
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 6)), pulse(A0, 1, *PATH[:6]))
    told(fold, pulse(A0, 0, epoch=LATER), event(A0, 1, path(0, 2), LATER), pulse(A0, 1, *PATH[:2], epoch=LATER))
    assert known(fold) == (2, 1, "")
    assert (told(fold, event(A0, 2, path(2, 6))), known(fold)) == ([], (2, 1, "")), "the former life's last word"


def test_08_events_heard_before_their_worker_is_known_are_recovered_all_the_same(fold: IndexFold) -> None:
    (question,) = told(fold, event(A0, 3, path(2, 4)))
    told(fold, WorkerCame("a", 1000), all_of(question, 3, *PATH[:4]))
    assert known(fold) == (4, 3, "")


def test_10_what_is_told_twice_is_done_once(fold: IndexFold) -> None:
    stream = [event(A0, 1, path(0, 4)), event(A0, 2, Removed((PATH[3],))), event(A0, 3, path(3, 5))]
    told(fold, *stream, *stream, *reversed(stream))
    assert (known(fold), fold.statistics().streams[A0].counts.duplicates) == ((5, 3, ""), 6)
    assert told(fold, pulse(A0, 3, *PATH[:5])) == []


def test_10_an_event_within_the_stream_that_says_what_is_known_counts_no_block_twice(fold: IndexFold) -> None:
    told(fold, event(A0, 1, path(0, 4)), event(A0, 2, path(0, 4)), event(A0, 3, Removed((PATH[3],))))
    assert (known(fold), told(fold, pulse(A0, 3, *PATH[:3]))) == ((3, 3, ""), [])


def test_12_ghosts_that_leave_no_gap_are_found_by_the_digest(fold: IndexFold) -> None:
    told(fold, event(A0, 1, path(0, 4)), event(A0, 2, Removed((12345,))))
    (question,) = told(fold, pulse(A0, 2, *PATH[:3]))
    assert len(question.request.buckets) > 0
    told(fold, all_of(question, 2, *PATH[:3]))
    assert (known(fold), told(fold, pulse(A0, 2, *PATH[:3]))) == ((3, 2, ""), [])


def test_16_a_loss_that_nothing_follows_is_found_by_the_heartbeat(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 2)), pulse(A0, 2, *PATH[:4]))
    assert known(fold) == (2, 1, "behind")
    (question,) = [each for quarter in range(1, 9) for each in fold.tick(quarter / 4)]
    assert (question.request.epoch, question.request.after_seq) == (EPOCH, 1)
    missing = codec.encode_message([Batch(EPOCH, 2, path(2, 4))])
    replay = ReplayChunk(request_id=question.request.request_id, epoch=EPOCH, last_seq=2, message=missing)
    assert told(fold, AnswerArrived(A0, replay), now_s=2.1) == []
    assert known(fold) == (4, 2, "")


def test_20_a_source_that_could_not_be_read_is_not_taken_for_an_empty_one(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0, stale="block_size: found 2662439576, allowed 32"))
    assert known(fold) == (0, 0, "source")


def test_21_a_clear_is_of_one_rank_and_one_tier(fold: IndexFold) -> None:
    for rank in (A0, A1, B0):
        told(fold, event(rank, 1, path()), event(rank, 2, path(0, 2, Tier.HOST)))
    told(fold, event(A0, 3, Cleared()))
    tiers = {rank: [fold.statistics().blocks[rank][tier] for tier in TIERS] for rank in (A0, A1, B0)}
    assert tiers == {A0: [0, 2, 0, 0], A1: [8, 2, 0, 0], B0: [8, 2, 0, 0]}


def test_22_two_publishers_under_one_name_do_not_take_turns_in_the_index(fold: IndexFold) -> None:
    for second in range(30):
        now_s = float(second)
        told(fold, pulse(A0, second), event(A0, second + 1, path(0, 1)), now_s=now_s)
        told(fold, pulse(A0, 0, epoch=LATER), now_s=now_s + 0.5)
    assert fold.statistics().streams[A0].counts.restarts == 1


def test_23_a_cache_that_outlives_its_publisher_is_had_by_a_repair_though_seqs_begin_at_zero(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 6)))
    (question,) = told(fold, pulse(A0, 0, *PATH[:6], epoch=LATER))
    assert (question.request.epoch, question.request.after_seq) == (LATER, 0)
    told(fold, all_of(question, 0, *PATH[:6], epoch=LATER))
    assert (known(fold), told(fold, pulse(A0, 0, *PATH[:6], epoch=LATER))) == ((6, 0, ""), [])
    assert told(fold, event(A0, 1, path(6, 8), LATER)) == []
    assert known(fold) == (8, 1, "")


def test_26_what_cannot_be_read_poisons_nothing_but_itself(fold: IndexFold) -> None:
    life = Life(A0, Random(26))
    told(fold, life.beat(), arrived(A0, *(life.batch() for _ in range(5))), pulse(B0, 0), event(B0, 1, path()))
    life.batch()
    (question,) = told(fold, BytesRefused(A0))
    told(fold, arrived(A0, life.batch(), life.batch()), *life.answer(question))
    assert (set(fold.held(A0)), known(fold)[2], known(fold, B0)[2]) == (set(life.rows()), "", "")


@pytest.mark.parametrize("seq", FAR_SEQS)
def test_27_an_id_out_of_range_is_not_believed_and_lower_ones_still_count(fold: IndexFold, seq: int) -> None:
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 2)))
    (question,) = told(fold, event(A0, seq, path(7, 8)))
    assert told(fold, event(A0, 2, path(2, 4))) == []
    assert known(fold) == (4, 2, "resyncing")
    end = ReplayChunk(request_id=question.request.request_id, epoch=EPOCH, last_seq=2, message=b"")
    assert told(fold, AnswerArrived(A0, end), event(A0, 3, path(4, 6)), pulse(A0, 3, *PATH[:6])) == []
    assert (known(fold), fold.statistics().streams[A0].counts.implausible) == ((6, 3, ""), 1)


@pytest.mark.parametrize("seq", FAR_SEQS)
def test_27_a_heartbeat_out_of_range_holds_nothing_up(fold: IndexFold, seq: int) -> None:
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 2)))
    (question,) = told(fold, pulse(A0, seq, *PATH))
    end = ReplayChunk(request_id=question.request.request_id, epoch=EPOCH, last_seq=1, message=b"")
    told(fold, AnswerArrived(A0, end))
    assert known(fold) == (2, 1, "")
    assert told(fold, event(A0, 2, path(2, 4)), pulse(A0, 2, *PATH[:4])) == []
    assert [fold.tick(now_s) for now_s in (1.0, 2.0, 3.0, 4.0)] == [[]] * 4


@pytest.mark.parametrize("seq", [9, *FAR_SEQS])
def test_27_an_answer_out_of_range_is_taken_back_once_heartbeats_tell_otherwise(fold: IndexFold, seq: int) -> None:
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 2)))
    (question,) = told(fold, BytesRefused(A0))
    told(fold, all_of(question, seq, *PATH))
    assert known(fold) == (8, seq, "")
    questions = []
    for second in range(1, 5):
        questions += told(fold, event(A0, 1 + second, path(1 + second, 2 + second)), now_s=second)
        questions += told(fold, pulse(A0, 1 + second, *PATH[: 2 + second]), now_s=second) + fold.tick(second)
    assert [question.request.epoch for question in questions] == [0], "all is wanted, the place is wrong"
    told(fold, all_of(questions[0], 5, *PATH[:6]), now_s=4.5)
    assert (known(fold), told(fold, event(A0, 6, path(6, 7)), now_s=4.5)) == ((6, 5, ""), [])
    assert known(fold) == (7, 6, "")


def test_27_an_id_that_is_wrong_but_near_is_forgotten_with_the_answer(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), event(A0, 1, path(0, 2)))
    (question,) = told(fold, event(A0, 900_000, path(7, 8)))
    told(fold, all_of(question, 3, *PATH[:5]))
    assert known(fold) == (5, 3, "")
    assert [fold.tick(now_s) for now_s in (1.0, 2.0, 3.0, 4.0)] == [[]] * 4


def test_29_blocks_behind_a_removed_one_are_there_again_when_it_is(fold: IndexFold) -> None:
    told(fold, event(A0, 1, path()), event(A0, 2, Removed((PATH[3],))))
    assert known(fold) == (3, 2, "")
    without = [block for block in PATH if block != PATH[3]]
    assert told(fold, pulse(A0, 2, *without)) == [], "they are held, and the digest says so"
    told(fold, event(A0, 3, path(3, 4)))
    assert known(fold) == (8, 3, "")


def test_29_a_repair_of_a_middle_block_brings_its_descendants_back(fold: IndexFold) -> None:
    told(fold, event(A0, 1, path()), event(A0, 2, Removed((PATH[3],))))
    (question,) = told(fold, pulse(A0, 2, *PATH))
    bucket = PATH[3] >> 56
    named = bytes(1 << (bucket & 7) if at == bucket >> 3 else 0 for at in range(32))
    rows = [HeldBlock(PATH[at], PATH[at - 1] if at else None, 1) for at in range(8) if PATH[at] >> 56 == bucket]
    (chunk,) = dump_chunks(question.request.request_id, EPOCH, 2, rows, buckets=named)
    assert told(fold, AnswerArrived(A0, chunk)) == []
    assert (known(fold), msgspec.structs.asdict(fold.statistics().streams[A0].counts)["repairs"]) == ((8, 2, ""), 1)
