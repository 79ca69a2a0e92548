"""A rank's state as bytes and as lines: what is written is read again, and other bytes are refused."""

import base64
import json

import msgspec
import pytest

from indexer.commands.dump import state_lines
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import BatchArrived, LogLost
from indexer.follow.rank_state import RankState, decode_state, encode_state
from kv_protocol.digest import SetDigest
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Stored, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from tests.reference.index.index import ReferenceIndex

A0 = WorkerRank("a", 0)


def fold() -> IndexFold:
    fold = IndexFold(ReferenceIndex(parked_blocks_max=10, parked_ttl_s=5.0))
    fold.apply(BatchArrived(A0, Batch(7, 1, Stored((1, 2)))), 0.0)
    fold.apply(BatchArrived(A0, Batch(7, 2, Stored((2,), parent=1, start=1, tier=Tier.HOST))), 0.0)
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
    away.apply(LogLost(), 1.0)
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
