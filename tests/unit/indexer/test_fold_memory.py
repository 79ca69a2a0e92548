"""An index without memory for all: until there is room, an overfull rank is stale and a new rank is refused."""

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from indexer.follow.fold import IndexFold
from indexer.follow.follower import FollowerLimits, has_room_again
from indexer.follow.inputs import Fact, LogConnected, Question, Received, WorkerGone, read_message
from indexer.index.prefix_index import IndexStatistics
from indexer.index.slots import REFUSED_NAMED_MAX
from indexer.native.index import NativeIndex
from kv_protocol import codec
from kv_protocol.events import Batch, Cleared, Removed, Stored
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock, RecoverRequest
from kv_protocol.splitmix import splitmix64
from tests.dumped import dump_chunks
from tests.reference.index.index import ReferenceIndex
from tests.reference.index.tree import HOLDING_BYTES, NODE_BYTES, RANK_BYTES
from tests.support.amount import examples
from tests.unit.indexer.life import EPOCH, Life, batch, pulse, stale, told, unreadable

A0, B0, C0 = WorkerRank("a", 0), WorkerRank("b", 0), WorkerRank("c", 0)
BLOCK_BYTES = NODE_BYTES + HOLDING_BYTES
BLOCKS_MAX = 1000
MEMORY_BYTES = 2 * RANK_BYTES + BLOCKS_MAX * BLOCK_BYTES


def chain(name: int, blocks: int) -> tuple[int, ...]:
    return tuple(splitmix64(name * 1_000_000 + at) for at in range(blocks))


A, B = chain(1, 900), chain(2, 900)


class Eager(ReferenceIndex):
    """Refuses blocks while what it says to use is half of what it was allowed."""

    def statistics(self) -> IndexStatistics:
        found = super().statistics()
        return msgspec.structs.replace(found, memory_bytes=found.memory_bytes // 2)


def make_fold(kind: type[ReferenceIndex] = ReferenceIndex, *, gone_s: float = 1e9) -> IndexFold:
    index = kind(memory_bytes_max=MEMORY_BYTES)
    return IndexFold(index, FollowerLimits(gap_s=0.0, behind_s=2.0, answer_s=2.0), gone_s=gone_s)


def stored(blocks: tuple[int, ...], first: int = 0) -> Stored:
    return Stored(blocks[first:], blocks[first - 1] if first else None, first)


def dump(rank: WorkerRank, request_id: int, last_seq: int, held: Iterable[int]) -> Received:
    rows, parent = [], None
    for block in held:
        rows.append(HeldBlock(block, parent, 1))
        parent = block
    (chunk,) = dump_chunks(request_id, EPOCH, last_seq, rows)
    return Received(rank, chunk)


def crowded(kind: type[ReferenceIndex] = ReferenceIndex, *, gone_s: float = 1e9) -> IndexFold:
    """Return a fold in which rank a has its 900 blocks, and rank b 100 of its 900."""
    fold = make_fold(kind, gone_s=gone_s)
    assert told(fold, batch(A0, 1, stored(A)), batch(B0, 1, stored(B))) == []
    fold.tick(0.0)
    return fold


# ------------------------------------------------------------------------------------------------- overfull


def test_a_rank_whose_blocks_do_not_fit_is_overfull_and_no_other() -> None:
    fold = crowded()
    assert stale(fold, A0, B0) == ["", "overfull"]
    now = fold.statistics()
    assert (now.overfull_ranks, now.index.refused_blocks_total, fold.overfull_ranks()) == (1, 800, {B0})
    assert (now.streams[B0].stale, now.streams[B0].cursor) == ("overfull", 1)
    assert fold.overlap(B, [B0])[0].overlap_blocks == (100,) * 4, "what fitted is there"


def test_its_digest_differs_from_its_source_and_blocks_that_do_not_fit_are_not_requested() -> None:
    fold = make_fold()
    told(fold, batch(A0, 1, stored(A)), batch(B0, 1, stored(B)))
    assert told(fold, pulse(B0, 1, *B)) == [], "known before the next tick"
    assert stale(fold, B0) == ["overfull"]
    for now_s in (0.25, 0.5, 60.0):
        assert told(fold, pulse(B0, 1, *B), now_s=now_s) == []
        assert fold.tick(now_s) == []
    assert fold.statistics().streams[B0].counts.digest_mismatches == 0


# ------------------------------------------------------------------------------------------------- healing


def test_there_may_be_memory_again_once_memory_or_nodes_have_fallen_by_a_tenth() -> None:
    found = ReferenceIndex().statistics()
    full = msgspec.structs.replace(found, memory_bytes=1000, nodes=100)
    for memory_bytes, nodes, expected in ((900, 100, True), (1000, 89, True), (901, 90, False)):
        now = msgspec.structs.replace(found, memory_bytes=memory_bytes, nodes=nodes)
        assert has_room_again(now, full) is expected


def test_once_memory_has_fallen_by_a_tenth_a_dump_is_asked_and_heals() -> None:
    fold = crowded()
    told(fold, batch(A0, 2, Removed(A[-BLOCKS_MAX // 10 :])))
    assert fold.tick(1.0) == []
    told(fold, batch(A0, 3, Cleared()))
    assert fold.tick(2.0) == [Question(B0, RecoverRequest(1))]
    assert fold.tick(2.1) == [], "one question is in flight"
    assert told(fold, dump(B0, 1, 1, B), now_s=2.2) == []
    assert stale(fold, A0, B0) == ["", ""]
    assert told(fold, pulse(B0, 1, *B), now_s=2.3) == []
    assert fold.overlap(B, [B0])[0].overlap_blocks == (900,) * 4
    assert (fold.tick(2.5), fold.statistics().overfull_ranks, fold.overfull_ranks()) == ([], 0, set())


@pytest.mark.parametrize("kind", [ReferenceIndex, Eager])
def test_a_dump_that_does_not_fit_is_asked_for_again_only_after_another_fall(kind: type[ReferenceIndex]) -> None:
    fold = crowded(kind)
    questions = []
    for step in range(1, 400):  # a dump is answered at once; memory falls by a block of rank a a step
        now_s = step / 4
        told(fold, batch(A0, 1 + step, Removed((A[-step],))), now_s=now_s)
        for question in fold.tick(now_s):
            questions.append(step)
            assert told(fold, dump(B0, question.request.request_id, 1, B), now_s=now_s) == []
        told(fold, pulse(B0, 1, *B), now_s=now_s)
    assert stale(fold, B0) == ["overfull"]
    assert 1 <= len(questions) <= 5, questions


def test_a_rank_that_holds_no_more_than_fitted_is_not_stale_once_that_is_proven() -> None:
    fold = crowded()
    told(fold, batch(B0, 2, Removed(B[100:])))
    assert (fold.tick(1.0), stale(fold, B0)) == ([], ["overfull"])
    assert told(fold, pulse(B0, 2, *B[:100]), now_s=1.0) == []
    assert (fold.tick(1.25), stale(fold, B0)) == ([], [""])
    told(fold, batch(B0, 3, stored(B, 100)))
    assert told(fold, pulse(B0, 3, *B), now_s=2.0) == []
    assert (fold.tick(2.25), stale(fold, B0)) == ([], ["overfull"])


@pytest.mark.parametrize("seqs_in_a_row", [True, False])
def test_what_was_proven_whole_is_not_when_the_next_blocks_are_refused(*, seqs_in_a_row: bool) -> None:
    fold = crowded()
    told(fold, batch(B0, 2, Removed(B[100:])), pulse(B0, 2, *B[:100]))
    assert stale(fold, B0) == [""]
    told(fold, batch(A0, 2, Removed(A[-1:])), batch(B0, 3, stored(B[:101], 100)))
    assert stale(fold, B0) == [""], "there was room for one"
    more = Batch(EPOCH, 4, stored(B, 101))
    message = read_message(codec.encode_message([more] if seqs_in_a_row else [more, more]))
    assert told(fold, Received(B0, message)) == []
    assert (stale(fold, B0), fold.overlap(B, [B0])[0].overlap_blocks[0]) == (["overfull"], 101)


ROOM_BYTES, ROOM_BLOCKS, SMALL_BLOCKS = 1_000_000, 2000, 1500
"""Too little memory for ranks a and b, and enough for c, which holds few more than `SMALL_BLOCKS`."""


def turn(life: Life, step: int) -> list[Batch]:
    """Return what the rank's consolidator says: work up to step 100, the end of a and b, silence."""
    if step < 100:
        return life.clear() if life.rank == C0 and len(life.held) > SMALL_BLOCKS else [life.batch()]
    return life.clear() if step == 100 and life.rank != C0 else []


@pytest.mark.parametrize("seed", range(examples(5, least=2)))
def test_whatever_was_refused_all_is_known_soon_after_there_is_room(seed: int) -> None:
    random = Random(seed)
    fold = IndexFold(NativeIndex(memory_bytes_max=ROOM_BYTES))
    lives = {rank: Life(rank, random, blocks_max=ROOM_BLOCKS) for rank in (A0, B0, C0)}
    was_overfull: set[WorkerRank] = set()
    for step in range(160):
        now_s = step / 4
        questions: list[Question] = []
        for rank, life in lives.items():
            if batches := turn(life, step):
                questions += fold.apply(Received(rank, read_message(codec.encode_message(batches))), now_s)
            if step % 4 == 0:
                questions += fold.apply(life.beat(), now_s)
        for question in [*questions, *fold.tick(now_s)]:
            for chunk in lives[question.rank].answer(question):
                assert fold.apply(chunk, now_s) == [], f"seed {seed}"
        was_overfull |= {rank for rank in lives if stale(fold, rank) == ["overfull"]}
    assert C0 in was_overfull, f"seed {seed}: there was room for all"
    assert stale(fold, *lives) == ["", "", ""], f"seed {seed}"
    assert {rank: set(fold.held(rank)) for rank in lives} == {rank: set(life.rows()) for rank, life in lives.items()}


# ------------------------------------------------------------------------------------------------- refused


def test_a_new_rank_for_which_there_is_no_memory_is_refused_by_name_and_admitted_when_there_is() -> None:
    fold = crowded()
    assert told(fold, pulse(C0, 1, 5), batch(C0, 1, Stored((5,)))) == []
    assert stale(fold, C0, WorkerRank("never", 0)) == ["refused", "never_heard"]
    assert (fold.statistics().refused_rank_facts_total, list(fold.refused_ranks())) == (2, [C0])
    assert str(MEMORY_BYTES) in fold.refused_ranks()[C0]
    told(fold, batch(A0, 2, Removed(A)))
    assert fold.refused_ranks() != {}, "admitted when it is heard again"
    told(fold, pulse(C0, 1, 5))
    assert (stale(fold, C0), fold.refused_ranks()) == (["behind"], {})
    assert told(fold, batch(C0, 1, Stored((5,))), pulse(C0, 1, 5)) == []
    assert stale(fold, C0) == [""]


def test_a_refused_rank_whose_worker_left_is_named_no_more() -> None:
    fold = crowded()
    told(fold, pulse(C0, 0), pulse(WorkerRank("d", 0), 0), WorkerGone("c"))
    assert list(fold.refused_ranks()) == [WorkerRank("d", 0)]


def test_bytes_of_a_refused_rank_that_could_not_be_read_are_counted_as_such() -> None:
    fold = crowded()
    told(fold, unreadable(C0))
    assert (fold.statistics().refused_messages_total, fold.statistics().refused_rank_facts_total) == (1, 1)


def beaten(fold: IndexFold, since_s: float, until_s: float, *facts: Fact) -> bool:
    """Let ranks a and b live on, facts come at the beginning, and ticks four times a second; is c named at the end."""
    told(fold, *facts, now_s=since_s)
    for quarter in range(round(since_s * 4), round(until_s * 4)):
        told(fold, pulse(A0, 1, *A), pulse(B0, 1, *B), now_s=quarter / 4)
        fold.tick(quarter / 4)
    return C0 in fold.refused_ranks()


def test_a_refused_rank_that_is_not_heard_again_is_named_no_more() -> None:
    fold = crowded(gone_s=5.0)
    assert beaten(fold, 0.0, 3.0, pulse(C0, 0))
    assert beaten(fold, 3.0, 7.0, pulse(C0, 0)), "it was heard again at 3 s"
    assert beaten(fold, 7.0, 8.0)
    assert not beaten(fold, 8.0, 8.5)
    assert stale(fold, C0) == ["never_heard"]


def test_while_the_log_is_away_or_the_process_asleep_the_silence_of_a_refused_rank_says_nothing() -> None:
    fold = crowded(gone_s=5.0)
    assert beaten(fold, 0.0, 1.0, pulse(C0, 0), LogConnected(False))
    assert beaten(fold, 1.0, 20.0)
    assert beaten(fold, 20.0, 24.5, LogConnected(True))
    assert beaten(fold, 124.5, 129.0)
    assert not beaten(fold, 129.0, 130.0)


def test_refused_ranks_without_end_cost_a_bounded_number_of_names() -> None:
    fold = crowded()
    told(fold, *(pulse(WorkerRank(f"s{each}", 0), 0) for each in range(REFUSED_NAMED_MAX + 50)))
    assert len(fold.refused_ranks()) == REFUSED_NAMED_MAX
    assert fold.statistics().refused_rank_facts_total == REFUSED_NAMED_MAX + 50
