"""Checkpoints: their bytes, which are refused whatever happened to them, and a fold that goes on from one."""

import struct
from random import Random

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from indexer.follow.checkpoint import Checkpoint, RankCheckpoint, decode_checkpoint, encode_checkpoint
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import BytesRefused, HeartbeatArrived, Question, WorkerGone
from indexer.follow.question import RECOVERIES_MAX
from indexer.native.index import NativeIndex
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import RecoverRequest
from tests.unit.indexer.life import Life, arrived, told

A0, A1, B0, C0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0), WorkerRank("c", 0)
CREATED, SEQ, WALL_NS = "2026-01-02T03:04:05Z", 77, 1_767_322_245_000_000_000
PLACE = RankCheckpoint("a", 3, 5, 7, 12, 11, "behind", "i")


def lived(fold: IndexFold, rank: WorkerRank, batches: int) -> Life:
    life = Life(rank, Random(str(rank)))
    told(fold, life.beat(), *(arrived(rank, life.batch()) for _ in range(batches)))
    return life


def restored(fold: IndexFold) -> IndexFold:
    """Return another fold, which knows what went through bytes."""
    other = IndexFold(NativeIndex())
    other.restore(decode_checkpoint(encode_checkpoint(fold.checkpoint(CREATED, SEQ, WALL_NS))), 0.0)
    return other


def places(fold: IndexFold) -> dict[WorkerRank, tuple[int, int, str]]:
    views = fold.overlap((), fold.ranks())
    return {rank: (view.epoch, view.seq, view.stale) for rank, view in zip(fold.ranks(), views, strict=True)}


# ------------------------------------------------------------------------------------------------- bytes


def test_a_checkpoint_is_what_its_bytes_say() -> None:
    checkpoint = Checkpoint(
        CREATED, SEQ, -WALL_NS, (PLACE, RankCheckpoint("b", 0, 0, (1 << 64) - 1, 0, 0, "", "")), b"index"
    )
    assert decode_checkpoint(encode_checkpoint(checkpoint)) == checkpoint


def test_its_bytes_are_these() -> None:
    body = msgspec.msgpack.encode(
        [CREATED, SEQ, WALL_NS, [["a", 3, 5, 7, 12, 11, "behind", "i"]], b"index"],
    )
    expected = b"KVCHECKP" + struct.pack("<IQ", 1, xxh3_64_intdigest(body)) + body
    assert encode_checkpoint(Checkpoint(CREATED, SEQ, WALL_NS, (PLACE,), b"index")) == expected


def small_checkpoint() -> bytes:
    fold = IndexFold(NativeIndex())
    lived(fold, A0, 5)
    return encode_checkpoint(fold.checkpoint(CREATED, SEQ, WALL_NS))


def test_every_truncation_of_a_checkpoint_is_refused() -> None:
    data = small_checkpoint()
    for length in range(len(data)):
        with pytest.raises(MalformedMessage):
            decode_checkpoint(data[:length])
    with pytest.raises(MalformedMessage):
        decode_checkpoint(data + b"\0")


def test_every_flipped_bit_of_a_checkpoint_is_refused() -> None:
    data = small_checkpoint()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(MalformedMessage):
            decode_checkpoint(bytes(flipped))


def sealed(*body: object) -> bytes:
    data = msgspec.msgpack.encode(body)
    return b"KVCHECKP" + struct.pack("<IQ", 1, xxh3_64_intdigest(data)) + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "20"),
        (b"KVROUTER" + bytes(30), "no checkpoint"),
        (b"KVCHECKP" + struct.pack("<IQ", 2, 0), "version 2, only 1"),
        (sealed(CREATED, SEQ, WALL_NS, []), "at least length 5, got 4"),
        (sealed(CREATED, SEQ, WALL_NS, [["a", 0, 0, 0, 0, 0, ""]], b""), "at least length 8, got 7"),
        (sealed(CREATED, -1, WALL_NS, [], b""), r">= 0 - at `\$\[1\]`"),
        (sealed(CREATED, SEQ, WALL_NS, [["A!", 0, 0, 0, 0, 0, "", ""]], b""), r"- at `\$\[3\]\[0\]\[0\]`"),
        (sealed(CREATED, SEQ, WALL_NS, [["a", 0, 4096, 0, 0, 0, "", ""]], b""), r"<= 4095 - at `\$\[3\]\[0\]\[2\]`"),
        (sealed(CREATED, SEQ, 1 << 63, [], b""), r"- at `\$\[2\]`"),
        (sealed(CREATED, SEQ, WALL_NS, [["a", 0, at, 0, 0, 0, "", ""] for at in (1, 2)], b""), "ranks"),
        (sealed(CREATED, SEQ, WALL_NS, [["a", at, 1, 0, 0, 0, "", ""] for at in (1, 2)], b""), "slots"),
    ],
    ids=["empty", "another kind", "version", "short", "short rank", "seq", "worker", "slot", "time", "ranks", "slots"],
)
def test_what_is_wrong_with_a_checkpoint_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedMessage, match=reason):
        decode_checkpoint(data)


# ------------------------------------------------------------------------------------------------- going on


def test_a_restored_fold_knows_what_the_other_knew() -> None:
    fold = IndexFold(NativeIndex())
    lives = [lived(fold, A1, 9), lived(fold, A0, 12)]
    other = restored(fold)
    assert places(other) == places(fold) == {A1: (7, 9, ""), A0: (7, 12, "")}
    for life in lives:
        assert set(other.held(life.rank)) == set(life.rows())
        assert told(other, arrived(life.rank, life.batch()), life.beat()) == []
        assert set(other.held(life.rank)) == set(life.rows())


def test_a_rank_without_a_place_is_one_of_which_nothing_was_heard() -> None:
    fold = IndexFold(NativeIndex())
    told(fold, BytesRefused(A0))
    other = restored(fold)
    assert places(other) == {A0: (0, 0, "never_heard")}


def test_the_life_of_a_worker_is_known_over_a_checkpoint() -> None:
    fold = IndexFold(NativeIndex())
    told(fold, HeartbeatArrived(A0, Heartbeat(instance="second", epoch=7, last_seq=0)))
    other = restored(fold)
    told(other, WorkerGone("a", "first"))
    assert other.ranks() == [A0]
    told(other, WorkerGone("a", "second"))
    assert other.ranks() == []


def test_an_index_that_cannot_be_read_changes_nothing() -> None:
    fold = IndexFold(NativeIndex())
    life = lived(fold, A0, 6)
    bad = msgspec.structs.replace(fold.checkpoint(CREATED, SEQ, WALL_NS), index=b"no index")
    with pytest.raises(MalformedMessage):
        fold.restore(bad, 0.0)
    assert (places(fold), set(fold.held(A0))) == ({A0: (7, 6, "")}, set(life.rows()))


def test_a_restored_rank_unknown_to_the_index_is_empty_and_an_index_rank_without_a_stream_is_dropped() -> None:
    fold = IndexFold(NativeIndex())
    lived(fold, A0, 6)
    saved = fold.checkpoint(CREATED, SEQ, WALL_NS)
    odd = msgspec.structs.replace(saved, ranks=(RankCheckpoint("b", 0, 4, 7, 3, 3, "", ""),))
    fold.restore(odd, 0.0)
    assert (places(fold), fold.held(B0), fold.statistics().index.ranks) == ({B0: (7, 3, "")}, [], 1)


# ------------------------------------------------------------------------------------------------- ahead of the log


def test_a_rank_advanced_by_an_answer_is_ahead_of_the_log_until_the_log_reaches_it() -> None:
    fold = IndexFold(NativeIndex())
    life = lived(fold, A0, 3)
    lived(fold, B0, 3)
    later = [life.batch() for _ in range(3)]
    (question,) = told(fold, BytesRefused(A0))
    told(fold, *life.answer(question))
    assert fold.off_log() == [A0]
    (saved,) = [place for place in fold.checkpoint(CREATED, SEQ, WALL_NS).ranks if place.worker_id == "a"]
    assert (saved.seq, saved.logged_seq) == (6, 3)
    other = restored(fold)
    for each in (fold, other):
        assert each.off_log() == [A0]
        told(each, arrived(A0, *later[:2]))
        assert each.off_log() == [A0]
        told(each, arrived(A0, later[2]))
        assert (each.off_log(), set(each.held(A0))) == ([], set(life.rows()))


def test_a_fold_that_is_restored_asks_nothing_that_it_wanted_before() -> None:
    fold = IndexFold(NativeIndex())
    empty = fold.checkpoint(CREATED, SEQ, WALL_NS)
    wanted = told(fold, *(BytesRefused(WorkerRank("w", at)) for at in range(RECOVERIES_MAX + 1)))
    assert len(wanted) == RECOVERIES_MAX, "one more waits for its turn"
    fold.restore(empty, 1.0)
    assert told(fold, BytesRefused(A0), now_s=1.0) == [Question(A0, RecoverRequest(RECOVERIES_MAX + 1))]
