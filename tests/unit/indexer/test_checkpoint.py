"""Checkpoints and ranks' states as bytes: other bytes are refused, and a fold goes on from what was written."""

import base64
import json
import struct
from random import Random

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from indexer.commands.dump import state_lines
from indexer.follow.checkpoint import (
    Checkpoint,
    RankCheckpoint,
    RankState,
    decode_checkpoint,
    decode_state,
    encode_checkpoint,
    encode_state,
)
from indexer.follow.fold import RECOVERIES_MAX, IndexFold
from indexer.follow.inputs import LogConnected, Question, Received, WorkerGone
from indexer.native.index import NativeIndex
from kv_protocol.digest import SetDigest
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock, RecoverRequest
from tests.reference.index.index import ReferenceIndex
from tests.unit.indexer.life import Life, arrived, told, unreadable

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


def test_a_rank_without_a_place_is_one_of_which_nothing_was_heard() -> None:
    fold = IndexFold(NativeIndex())
    told(fold, unreadable(A0))
    other = restored(fold)
    assert places(other) == {A0: (0, 0, "never_heard")}


def test_the_life_of_a_worker_is_known_over_a_checkpoint() -> None:
    fold = IndexFold(NativeIndex())
    told(fold, Received(A0, Heartbeat(instance="second", epoch=7, last_seq=0)))
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
    (question,) = told(fold, unreadable(A0))
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
    wanted = told(fold, *(unreadable(WorkerRank("w", at)) for at in range(RECOVERIES_MAX + 1)))
    assert len(wanted) == RECOVERIES_MAX, "one more waits for its turn"
    fold.restore(empty, 1.0)
    assert told(fold, unreadable(A0), now_s=1.0) == [Question(A0, RecoverRequest(RECOVERIES_MAX + 1))]


def fold() -> IndexFold:
    fold = IndexFold(ReferenceIndex())
    fold.apply(arrived(A0, Batch(7, 1, Stored((1, 2)))), 0.0)
    fold.apply(arrived(A0, Batch(7, 2, Stored((2,), parent=1, start=1, tier=Tier.HOST))), 0.0)
    return fold


def state() -> RankState:
    found = fold().state(A0)
    assert found is not None
    return found


def test_a_fold_tells_a_rank_s_place_blocks_and_digests() -> None:
    told = state()
    assert (told.rank, told.epoch, told.seq, told.logged_seq, told.stale) == (A0, 7, 2, 2, "")
    assert list(told.blocks()) == [HeldBlock(1, None, 1), HeldBlock(2, 1, 3)]
    assert told.digests == tuple(
        SetDigest(blocks).of_tier(tier) for tier, blocks in zip(TIERS, ([1, 2], [2], [], []), strict=True)
    )
    assert told.block_counts == {"gpu": 2, "host": 1, "disk": 0, "external": 0}
    assert fold().state(WorkerRank("a", 1)) is None


def test_while_the_log_is_away_a_state_says_so() -> None:
    away = fold()
    away.apply(LogConnected(False), 1.0)
    told = away.state(A0)
    assert told is not None
    assert told.stale == "log_away"


def test_a_state_survives_its_bytes() -> None:
    assert decode_state(encode_state(state())) == state()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"worker_id": "No Name"}, "- at `$.worker_id`"),
        ({"dp_rank": 5000}, "<= 4095 - at `$.dp_rank`"),
        ({"seq": -1}, ">= 0 - at `$.seq`"),
        ({"digests": []}, "digests: found (), allowed one of each tier, in order"),
        ({"chunks": [{"parents": b"", "hashes": b"", "tiers": b"\x01"}]}, "columns: found (0, 0, 1)"),
        ({"epoch": "x"}, "Expected `int`"),
    ],
)
def test_bytes_that_say_no_state_are_refused_by_name(change: dict[str, object], words: str) -> None:
    told = msgspec.msgpack.decode(encode_state(state()))
    with pytest.raises(MalformedMessage) as refused:
        decode_state(msgspec.msgpack.encode({**told, **change}))
    assert words in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"\x00", b"{}", b"\xff" * 100, b"\x91" * 100_000])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_state(data)


def test_as_json_a_rank_is_its_place_and_then_a_line_a_block_parents_first() -> None:
    place, *blocks = map(json.loads, state_lines(state(), "json"))
    rank = {"worker_id": "a", "dp_rank": 0}
    counts = {"gpu": 2, "host": 1, "disk": 0, "external": 0}
    assert place == {**rank, "epoch": 7, "seq": 2, "logged_seq": 2, "stale": "", "blocks": counts}
    assert blocks == [
        {**rank, "sequence_hash": 1, "parent": None, "media": ["gpu"]},
        {**rank, "sequence_hash": 2, "parent": 1, "media": ["gpu", "host"]},
    ]


def test_as_columns_a_rank_is_one_line_that_can_be_read_again() -> None:
    (line,) = state_lines(state(), "columns")
    assert msgspec.json.decode(line, type=RankState) == state()
    assert base64.b64decode(json.loads(line)["chunks"][0]["hashes"]) == (1).to_bytes(8, "little") + (2).to_bytes(
        8, "little"
    )
