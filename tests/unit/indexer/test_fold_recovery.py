"""Ranks that lost their place or their faith, and get it back: by replay, repair or dump, each in its turn."""

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from indexer.follow.fold import RECOVERIES_MAX, IndexFold
from indexer.follow.follower import FollowerLimits
from indexer.follow.inputs import LogConnected, Question, Received, WorkerGone
from indexer.native.index import NativeIndex
from kv_protocol.events import Batch, Stored
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import DumpChunk, ReplayChunk
from kv_protocol.splitmix import splitmix64
from tests.unit.indexer.life import Life, arrived, stale, told, unreadable

A0, B0 = WorkerRank("a", 0), WorkerRank("b", 0)
SPOILT = 1 << 20


@pytest.fixture
def fold() -> IndexFold:
    return IndexFold(NativeIndex(), FollowerLimits(gap_s=0.0), gone_s=20.0)


def lived(fold: IndexFold, batches: int, rank: WorkerRank = A0) -> Life:
    """Return a life of which the index knows the first so many batches."""
    life = Life(rank, Random(str(rank)))
    told(fold, life.beat(), *(arrived(rank, life.batch()) for _ in range(batches)), life.beat())
    assert (stale(fold, rank), set(fold.held(rank))) == ([""], set(life.rows()))
    return life


def spoilt(batch: Batch) -> Batch:
    """Return a batch that can be read, and is of other blocks."""
    event = batch.event
    assert isinstance(event, Stored)
    hashes = tuple(block ^ SPOILT for block in event.sequence_hashes)
    return msgspec.structs.replace(batch, event=msgspec.structs.replace(event, sequence_hashes=hashes))


def refused(fold: IndexFold, ranks: Sequence[WorkerRank], now_s: float = 0) -> list[WorkerRank]:
    """Return the ranks that are asked after bytes of all these ranks could not be read."""
    return [question.rank for question in told(fold, *map(unreadable, ranks), now_s=now_s)]


def asked(questions: list[Question]) -> list[WorkerRank]:
    return [question.rank for question in questions]


# ------------------------------------------------------------------------------------------------- three kinds


def test_a_hole_is_filled_by_a_replay(fold: IndexFold) -> None:
    life = lived(fold, 20)
    life.batch()
    (question,) = told(fold, arrived(A0, life.batch(), life.batch()))
    assert (question.request.epoch, question.request.after_seq, question.request.buckets) == (life.epoch, 20, b"")
    answer = life.answer(question)
    assert isinstance(answer[0].content, ReplayChunk)
    assert told(fold, *answer) == []
    assert (stale(fold, A0), set(fold.held(A0))) == ([""], set(life.rows()))
    assert fold.statistics().streams[A0].counts.replays == 1


def test_a_hole_that_is_too_old_for_a_replay_is_filled_by_a_dump(fold: IndexFold) -> None:
    life = lived(fold, 20)
    batches = [life.batch() for _ in range(30)]
    (question,) = told(fold, arrived(A0, batches[-1]))
    answer = life.answer(question)
    assert isinstance(answer[0].content, DumpChunk)
    assert told(fold, *answer) == []
    assert (stale(fold, A0), set(fold.held(A0))) == ([""], set(life.rows()))
    assert fold.statistics().streams[A0].counts.resyncs == 1


def test_a_set_that_went_wrong_in_silence_is_repaired_where_it_is_wrong(fold: IndexFold) -> None:
    life = lived(fold, 40)
    chain = tuple(splitmix64(1000 + at) for at in range(3))
    life.held |= {block: (parent, 1) for parent, block in zip((None, *chain), chain, strict=False)}
    assert told(fold, arrived(A0, spoilt(life.published(Stored(chain))))) == []
    (question,) = told(fold, life.beat())
    assert len(question.request.buckets) == 8192
    told(fold, arrived(A0, life.batch()))
    answer = life.answer(question)
    assert isinstance(answer[0].content, DumpChunk)
    assert 0 < int.from_bytes(answer[0].content.buckets).bit_count() <= 12
    assert told(fold, *answer) == []
    assert told(fold, life.beat()) == []
    assert (stale(fold, A0), set(fold.held(A0))) == ([""], set(life.rows()))
    counts = fold.statistics().streams[A0].counts
    assert (counts.digest_mismatches, counts.repairs, counts.resyncs, counts.heals) == (1, 1, 0, 1)


def test_nothing_is_applied_between_the_question_for_a_repair_and_its_answer(fold: IndexFold) -> None:
    life = lived(fold, 20)
    before = set(fold.held(A0))
    (question,) = told(fold, unreadable(A0))
    answer = life.answer(question)
    later = [life.batch() for _ in range(5)]
    told(fold, *(arrived(A0, batch) for batch in later))
    assert set(fold.held(A0)) == before
    told(fold, *answer)
    assert (fold.overlap((), [A0])[0].seq, set(fold.held(A0))) == (25, set(life.rows()))


# ------------------------------------------------------------------------------------------------- turns


def crowd(fold: IndexFold, count: int) -> dict[WorkerRank, Life]:
    ranks = [WorkerRank(f"w{at:02}", 0) for at in range(count)]
    return {rank: lived(fold, 2, rank) for rank in ranks}


def test_so_many_are_asked_at_once_and_no_more_and_the_others_in_their_turn(fold: IndexFold) -> None:
    lives = crowd(fold, RECOVERIES_MAX + 3)
    ranks = list(lives)
    questions = told(fold, *map(unreadable, ranks))
    assert asked(questions) == ranks[:RECOVERIES_MAX]
    for at in range(3):
        assert asked(told(fold, *lives[ranks[at]].answer(questions[at]))) == [ranks[RECOVERIES_MAX + at]]
    assert told(fold, *lives[ranks[3]].answer(questions[3])) == []
    assert stale(fold, *ranks[:5], ranks[-1]) == [""] * 4 + ["resyncing"] * 2


def test_a_stream_that_needs_no_answer_any_more_frees_its_place(fold: IndexFold) -> None:
    lives = crowd(fold, RECOVERIES_MAX + 2)
    ranks = list(lives)
    missing = {rank: life.batch() for rank, life in lives.items()}
    questions = told(fold, *(arrived(rank, life.batch()) for rank, life in lives.items()))
    assert asked(questions) == ranks[:RECOVERIES_MAX]
    assert asked(told(fold, arrived(ranks[0], missing[ranks[0]]))) == [ranks[-2]], "its hole closed by itself"
    assert asked(told(fold, WorkerGone(ranks[1].worker_id))) == [ranks[-1]]
    told(fold, arrived(ranks[-1], missing[ranks[-1]]))
    assert stale(fold, ranks[-1]) == [""]


def test_a_waiting_rank_that_leaves_is_not_asked_nor_the_rank_in_its_slot(fold: IndexFold) -> None:
    lives = crowd(fold, RECOVERIES_MAX + 2)
    ranks = list(lives)
    questions = told(fold, *map(unreadable, ranks))
    told(fold, WorkerGone(ranks[-2].worker_id))
    assert told(fold, Life(A0, Random(1)).beat()) == []
    assert asked(told(fold, *lives[ranks[0]].answer(questions[0]))) == [ranks[-1]]
    assert told(fold, *lives[ranks[1]].answer(questions[1])) == []


# ------------------------------------------------------------------------------------------------- the log is away


def test_while_the_log_is_away_only_current_and_late_ranks_are_marked_log_away(fold: IndexFold) -> None:
    ranks = list(crowd(fold, 2))
    ahead = Heartbeat(instance="i", epoch=7, last_seq=9)
    told(fold, Received(ranks[1], ahead), unreadable(B0), LogConnected(False))
    assert stale(fold, *ranks, B0, A0) == ["log_away", "log_away", "resyncing", "never_heard"]
    assert [stream.stale for stream in fold.statistics().streams.values()] == ["log_away", "log_away", "resyncing"]
    told(fold, LogConnected(True), now_s=1.0)
    assert stale(fold, *ranks, B0) == ["", "behind", "resyncing"]


def test_while_the_log_is_away_no_rank_is_asked_or_late(fold: IndexFold) -> None:
    life = lived(fold, 3)
    late = life.batch()
    told(fold, life.beat(), LogConnected(False))
    assert [refused(fold, [B0], now_s) + asked(fold.tick(now_s)) for now_s in (0.5, 5.0, 50.0)] == [[]] * 3
    assert asked(told(fold, LogConnected(True), now_s=50.0)) == [B0]
    assert stale(fold, A0) == ["behind"]
    assert [asked(fold.tick(now_s)) for now_s in (50.9, 51.9, 52.0)] == [[], [], [A0, B0]]
    assert fold.statistics().streams[A0].counts.heals == 0
    told(fold, arrived(A0, late), now_s=52.1)
    assert stale(fold, A0) == [""]


def test_an_outage_is_no_time_to_heal(fold: IndexFold) -> None:
    lived(fold, 3)
    told(fold, LogConnected(False), now_s=1.0)
    told(fold, LogConnected(True), now_s=100.0)
    assert fold.statistics().streams[A0].counts.heals == 0
