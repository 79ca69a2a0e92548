"""Hop A's frames, and payloads as we write them: byte by byte, and read again as they were said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.capture.payloads import encode_payload
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS
from kv_protocol.hashing import Namespace
from worker_agent.events.dialects.batches import (
    REPLAY_END,
    BatchDecoder,
    decode_sequence,
    encode_sequence,
    split_frames,
    split_replay,
)
from worker_agent.events.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored

U64 = 2**64


u64s = st.integers(0, U64 - 1)
texts = st.none() | st.text(min_size=1)
hash_tuples = st.lists(u64s, max_size=5, unique=True).map(tuple)
groups = st.integers(0, 255)


@st.composite
def stores(draw: st.DrawFn) -> EngineStored:
    """Return any store of blocks with their tokens."""
    hashes = draw(hash_tuples.filter(len))
    is_eagle, block_size = draw(st.booleans()), draw(st.integers(1, 4))
    tokens = len(hashes) * block_size + is_eagle
    items = draw(st.lists(st.lists(u64s, max_size=2).map(tuple), min_size=len(hashes), max_size=len(hashes)))
    return EngineStored(
        block_hashes=hashes,
        parent_block_hash=draw(st.none() | u64s.filter(lambda parent: parent not in hashes)),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=tokens, max_size=tokens))),
        block_size=block_size,
        tier=draw(st.sampled_from(TIERS)),
        namespace=Namespace(*draw(st.tuples(*[texts] * len(Namespace._fields)))),
        mm_hashes=tuple(items) if any(items) else (),
        is_eagle=is_eagle,
        group_idx=draw(groups),
    )


names = st.builds(
    EngineStored,
    block_hashes=hash_tuples,
    parent_block_hash=st.none(),
    token_ids=st.just(()),
    block_size=st.integers(0, 4096),
    tier=st.sampled_from(TIERS),
    namespace=st.builds(Namespace, st.none(), texts),
    group_idx=groups,
)
removals = st.builds(EngineRemoved, block_hashes=hash_tuples, tier=st.sampled_from(TIERS), group_idx=groups)
engine_events = stores() | names | removals | st.just(EngineCleared())


@given(st.lists(engine_events, max_size=4), st.integers(0, 7))
def test_what_is_written_is_read_again(events: list[EngineEvent], dp_rank: int) -> None:
    assert BatchDecoder().decode(8, encode_payload(0.5, events, dp_rank)) == EngineBatch(
        sequence=8, time_s=0.5, dp_rank=dp_rank, events=tuple(events)
    )


# -------------------------------------------------------------------- frames
def test_a_sequence_frame_is_eight_bytes_big_endian() -> None:
    assert encode_sequence(0x0102030405060708) == bytes.fromhex("0102030405060708")
    assert encode_sequence(REPLAY_END) == b"\xff" * 8
    assert [decode_sequence(encode_sequence(n)) for n in (0, 1, 2**63, REPLAY_END)] == [0, 1, 2**63, REPLAY_END]


def test_a_sequence_frame_of_another_length_is_malformed() -> None:
    for length in (0, 1, 7, 9, 16):
        with pytest.raises(MalformedMessage, match=f"sequence frame of {length} bytes"):
            decode_sequence(bytes(length))


def test_a_published_message_is_topic_sequence_and_payload() -> None:
    sequence = encode_sequence(1)
    for topic in (b"", b"kv-events"):
        assert split_frames([topic, sequence, b"payload"]) == (1, b"payload")
    for frames in ([], [b"x"], [b"", sequence], [b"", sequence, b"", b""]):
        with pytest.raises(MalformedMessage, match=f"{len(frames)} frames"):
            split_frames(frames)
    with pytest.raises(MalformedMessage, match="sequence frame"):
        split_frames([sequence, b"payload", b""])


def test_a_replayed_message_comes_with_or_without_its_topic() -> None:
    sequence = encode_sequence(7)
    for topic in ([], [b""], [b"kv-events"]):
        assert split_replay([b"", *topic, sequence, b"payload"]) == (7, b"payload")
        assert split_replay([b"", *topic, encode_sequence(REPLAY_END), b""]) == (REPLAY_END, b"")
    for frames in ([], [b"", sequence], [b"", b"", b"", sequence, b""], [b"x", sequence, b""], [b"", b"short", b""]):
        with pytest.raises(MalformedMessage):
            split_replay(frames)
