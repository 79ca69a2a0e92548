"""Hop A byte by byte: payloads as other publishers write them, ours as others read them, and what is none."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.events import Tier
from worker_agent.core.dialects import hop_a
from worker_agent.core.dialects.hop_a import (
    MEDIUM_OF_TIER,
    PAYLOAD_BYTES_MAX,
    REPLAY_END,
    TIER_OF_MEDIUM,
    TIME_S_MAX,
    decode_payload,
    decode_sequence,
    encode_payload,
    encode_sequence,
    split_frames,
    split_replay,
)
from worker_agent.core.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored

U64 = 2**64

# Source: event_plane.md section 3.7. ts = 1.5 in all of them.
TRTLLM_STORED = (
    "93 cb3ff8000000000000"  # [1.5,
    "91 85 a474797065 ab426c6f636b53746f726564"  # [{"type": "BlockStored",
    "ac626c6f636b5f686173686573 92 fb 06"  # "block_hashes": [-5, 6],
    "b1706172656e745f626c6f636b5f68617368 c0"  # "parent_block_hash": nil,
    "a9746f6b656e5f696473 98 0102030405060708"  # "token_ids": [1..8],
    "aa626c6f636b5f73697a65 04 00"  # "block_size": 4}], 0]
)
TRTLLM_REMOVED = "93cb3ff80000000000009182a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391fb01"
VLLM_STORED = (
    "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504"
    "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
)
CLEARED = "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"
OLD_VLLM_ARRAY = "93cb3ff8000000000000919aab426c6f636b53746f7265649107c0940102030404c0a3475055c0c0c000"


def stored(*hashes: int, parent: int | None = None, block_size: int = 4, **fields: Any) -> EngineStored:
    """Return a store whose tokens count up from 1."""
    tokens = tuple(range(1, block_size * len(hashes) + 1))
    return EngineStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=block_size, **fields
    )


def wire(*events: object, time_s: object = 1.5, dp_rank: object = 0) -> bytes:
    """Return a payload of events as they come, right or wrong."""
    return msgspec.msgpack.encode([time_s, list(events), dp_rank])


def stored_map(**changes: object) -> dict[str, object]:
    """Return a readable store, with changes."""
    return {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        **changes,
    }


GOOD = EngineRemoved(block_hashes=(9,))
GOOD_MAP = {"type": "BlockRemoved", "block_hashes": [9]}


@pytest.mark.parametrize(
    ("payload", "dp_rank", "event"),
    [
        (TRTLLM_STORED, 0, stored(U64 - 5, 6)),
        (TRTLLM_REMOVED, 1, EngineRemoved(block_hashes=(U64 - 5,))),
        (VLLM_STORED, 0, stored(7)),
        (CLEARED, 0, EngineCleared()),
    ],
    ids=["TensorRT-LLM stored", "TensorRT-LLM removed", "vLLM 0.24 stored", "cleared"],
)
def test_the_field_s_maps_decode_as_stated(payload: str, dp_rank: int, event: EngineEvent) -> None:
    expected = EngineBatch(sequence=3, time_s=1.5, dp_rank=dp_rank, events=(event,))
    assert decode_payload(3, bytes.fromhex(payload)) == expected


def test_an_event_of_the_old_array_form_is_refused_by_name_and_costs_nothing_else() -> None:
    batch = decode_payload(0, bytes.fromhex(OLD_VLLM_ARRAY))
    assert batch.events == ()
    assert len(batch.refused) == 1


def test_a_store_is_written_as_the_field_writes_it_with_its_medium() -> None:
    medium = "a66d656469756d a3475055"
    expected = bytes.fromhex(TRTLLM_STORED.replace("91 85", "91 86").removesuffix("00") + medium + "00")
    assert encode_payload(1.5, [stored(U64 - 5, 6)], 0) == expected


def test_a_clear_is_written_as_the_field_writes_it() -> None:
    assert encode_payload(1.5, [EngineCleared()], 0) == bytes.fromhex(CLEARED)


def test_a_payload_is_a_three_array_of_float_maps_and_rank() -> None:
    events: list[EngineEvent] = [
        stored(5, parent=U64 - 1, lora_name="a", cache_salt="s"),
        EngineRemoved(block_hashes=(6,), tier=Tier.HOST),
    ]
    assert msgspec.msgpack.decode(encode_payload(2.0, events, 3)) == [
        2.0,
        [
            stored_map(block_hashes=[5], parent_block_hash=-1, medium="GPU", lora_name="a", cache_salt="s"),
            {"type": "BlockRemoved", "block_hashes": [6], "medium": "CPU"},
        ],
        3,
    ]


@pytest.mark.parametrize(
    "event",
    [
        stored(1, 2, 3, parent=4),
        stored(0, parent=0),
        stored(U64 - 1, parent=U64 // 2, tier=Tier.EXTERNAL),
        stored(1, lora_name="adapter", cache_salt="salt", tier=Tier.DISK),
        stored(),
        EngineRemoved(block_hashes=(1, U64 - 1), tier=Tier.HOST),
        EngineRemoved(block_hashes=()),
        EngineCleared(),
    ],
)
def test_what_is_written_is_read_again(event: EngineEvent) -> None:
    assert decode_payload(8, encode_payload(0.0, [event, event], 2)) == EngineBatch(
        sequence=8, time_s=0.0, dp_rank=2, events=(event, event)
    )


@pytest.mark.parametrize(
    ("inside", "on_the_wire"),
    [
        (0, 0),
        (1, 1),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**63 + 1, -(2**63) + 1),
        (U64 - 1, -1),
    ],
)
def test_hashes_are_u64_inside_and_i64_on_the_wire_and_either_is_read(inside: int, on_the_wire: int) -> None:
    written = msgspec.msgpack.decode(encode_payload(0.0, [stored(inside, parent=inside)], 0))[1][0]
    assert (written["block_hashes"], written["parent_block_hash"]) == ([on_the_wire], on_the_wire)
    for spelling in (inside, on_the_wire):
        event = stored_map(block_hashes=[spelling], parent_block_hash=spelling)
        assert decode_payload(0, wire(event)).events == (stored(inside, parent=inside),)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("DEVICE", Tier.GPU),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("DISK", Tier.DISK),
        ("NVME", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("EXTERNAL", Tier.EXTERNAL),
        ("NETWORK", Tier.EXTERNAL),
        ("REMOTE", Tier.EXTERNAL),
        ("SHARED", Tier.EXTERNAL),
    ],
)
def test_every_spelling_of_a_medium_is_a_tier(medium: str | None, tier: Tier) -> None:
    batch = decode_payload(0, wire(stored_map(medium=medium), {**GOOD_MAP, "medium": medium}))
    assert batch.events == (stored(7, tier=tier), EngineRemoved(block_hashes=(9,), tier=tier))


def test_no_spelling_of_a_medium_is_left_untested_or_unreadable() -> None:
    assert len(TIER_OF_MEDIUM) == 14
    assert {TIER_OF_MEDIUM[medium]: medium for medium in MEDIUM_OF_TIER.values()} == MEDIUM_OF_TIER


@pytest.mark.parametrize(("dp_rank", "read"), [(None, None), (0, 0), (3, 3)])
def test_the_rank_is_the_batch_s_own_or_none(dp_rank: int | None, read: int | None) -> None:
    assert decode_payload(0, wire(GOOD_MAP, dp_rank=dp_rank)).dp_rank == read


@pytest.mark.parametrize("time_s", [0, 0.0, 1.7e9, TIME_S_MAX])
def test_any_time_that_nanoseconds_can_say_is_read(time_s: float) -> None:
    assert decode_payload(0, wire(GOOD_MAP, time_s=time_s)).time_s == time_s
    assert round(TIME_S_MAX * 1e9) < 2**63


def test_unknown_keys_of_newer_publishers_are_skipped() -> None:
    newer = {"lora_id": 3, "extra_keys": [["x", 1]], "group_idx": 0, "kv_cache_spec_kind": "full_attention", "new": {}}
    assert decode_payload(0, wire(stored_map(**newer))).events == (stored(7),)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(stored_map(medium="gpu"), id="medium in lower case"),
        pytest.param(stored_map(medium="FOO"), id="unknown medium"),
        pytest.param(stored_map(token_ids=[1, 2, 3]), id="too few tokens"),
        pytest.param(stored_map(token_ids=[1, 2, 3, 4, 5]), id="too many tokens"),
        pytest.param(stored_map(token_ids=[1, 2, 3, -4]), id="negative token"),
        pytest.param(stored_map(token_ids=[1, 2, 3, 2**32]), id="token beyond u32"),
        pytest.param(stored_map(token_ids=[1, 2, 3, None]), id="token null"),
        pytest.param(stored_map(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]), id="bigrams"),
        pytest.param(stored_map(block_size=0), id="block size 0"),
        pytest.param(stored_map(block_size=-4), id="negative block size"),
        pytest.param(stored_map(block_hashes=[b"12345678"]), id="hash in bytes"),
        pytest.param(stored_map(block_hashes=["7"]), id="hash as text"),
        pytest.param(stored_map(block_hashes=[1.5]), id="hash as float"),
        pytest.param(stored_map(block_hashes=[None]), id="hash null"),
        pytest.param(stored_map(block_hashes=None), id="hashes null"),
        pytest.param(stored_map(lora_name={"cache_salt": "s"}), id="adapter is an object"),
        pytest.param({"type": "BlockStored", "block_hashes": [7]}, id="missing keys"),
        pytest.param({"type": "BlockMoved", "block_hashes": [7]}, id="unknown type"),
        pytest.param({"block_hashes": [7]}, id="no type"),
        pytest.param(["BlockRemoved", [7]], id="array form"),
        pytest.param({}, id="empty map"),
        pytest.param(None, id="nil"),
        pytest.param(7, id="number"),
        pytest.param(msgspec.Raw(b"\x81\xa4type\xa4\xff\xff\xff\xff"), id="text that is no UTF-8"),
        pytest.param(msgspec.Raw(b"\xd4\x01\x00"), id="extension"),
    ],
)
def test_one_bad_event_never_costs_its_batch(bad: object) -> None:
    batch = decode_payload(5, wire(GOOD_MAP, bad, GOOD_MAP, dp_rank=2))
    assert batch.events == (GOOD, GOOD)
    assert (batch.sequence, batch.dp_rank, len(batch.refused)) == (5, 2, 1)
    assert batch.refused[0]


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(msgspec.msgpack.encode([1.5, []]), id="two of three, as old publishers sent"),
        pytest.param(msgspec.msgpack.encode([1.5, [], 0, 0]), id="four of three"),
        pytest.param(msgspec.msgpack.encode({"ts": 1.5}), id="map"),
        pytest.param(wire(time_s="now"), id="time as text"),
        pytest.param(wire(time_s=None), id="time null"),
        pytest.param(wire(time_s=float("nan")), id="time is no number"),
        pytest.param(wire(time_s=float("inf")), id="time without end"),
        pytest.param(wire(time_s=1e300), id="time beyond i64 nanoseconds"),
        pytest.param(wire(time_s=-1.0), id="time before 1970"),
        pytest.param(wire(dp_rank="0"), id="rank as text"),
        pytest.param(wire(GOOD_MAP) + b"\0", id="bytes behind"),
        pytest.param(msgspec.msgpack.encode([1.5, {}, 0]), id="events are no array"),
        pytest.param(
            b"\x93\xcb\x3f\xf8" + bytes(6) + b"\x91" + b"\x91" * 200_000 + b"\xc0\x00", id="nested too deeply"
        ),
    ],
)
def test_a_batch_that_is_none_is_malformed_and_named_by_its_sequence(payload: bytes) -> None:
    with pytest.raises(MalformedMessage, match="batch 77"):
        decode_payload(77, payload)


@pytest.mark.parametrize("payload", [TRTLLM_STORED, TRTLLM_REMOVED, VLLM_STORED, CLEARED])
def test_a_truncated_payload_is_malformed_wherever_it_is_cut(payload: str) -> None:
    whole = bytes.fromhex(payload)
    for length in range(len(whole)):
        with pytest.raises(MalformedMessage):
            decode_payload(0, whole[:length])


@pytest.mark.parametrize("payload", [TRTLLM_STORED, TRTLLM_REMOVED, VLLM_STORED, CLEARED])
def test_a_wrong_byte_anywhere_is_read_or_refused_and_never_more(payload: str) -> None:
    whole = bytes.fromhex(payload)
    for at in range(len(whole)):
        for value in bytes.fromhex("00 01 7f 80 90 a0 c0 c1 c4 ca cf d0 dc de ff"):
            try:
                batch = decode_payload(0, whole[:at] + bytes([value]) + whole[at + 1 :])
            except MalformedMessage:
                continue
            assert len(batch.events) + len(batch.refused) <= 1


def test_a_store_whose_tokens_do_not_fill_its_blocks_cannot_exist() -> None:
    with pytest.raises(LimitExceeded, match="token_ids: found 3"):
        EngineStored(block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2, 3), block_size=4)


# -------------------------------------------------------------------- frames
def test_a_sequence_frame_is_eight_bytes_big_endian() -> None:
    assert encode_sequence(0x0102030405060708) == bytes.fromhex("0102030405060708")
    assert encode_sequence(REPLAY_END) == b"\xff" * 8
    assert [decode_sequence(encode_sequence(n)) for n in (0, 1, 2**63, REPLAY_END)] == [0, 1, 2**63, REPLAY_END]


@pytest.mark.parametrize("length", [0, 1, 7, 9, 16])
def test_a_sequence_frame_of_another_length_is_malformed(length: int) -> None:
    with pytest.raises(MalformedMessage, match=f"sequence frame of {length} bytes"):
        decode_sequence(bytes(length))


@pytest.mark.parametrize("topic", [b"", b"kv-events"])
def test_a_published_message_is_topic_sequence_and_payload(topic: bytes) -> None:
    assert split_frames([topic, encode_sequence(7), b"payload"]) == (7, b"payload")


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", encode_sequence(1)], [b"", encode_sequence(1), b"", b""]])
def test_a_published_message_of_other_than_three_frames_is_malformed(frames: Sequence[bytes]) -> None:
    with pytest.raises(MalformedMessage, match=f"{len(frames)} frames"):
        split_frames(frames)


def test_a_published_message_whose_sequence_is_none_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="sequence frame"):
        split_frames([encode_sequence(1), b"payload", b""])


@pytest.mark.parametrize("topic", [[], [b""], [b"kv-events"]], ids=["without topic", "empty topic", "topic"])
def test_a_replayed_message_comes_with_or_without_its_topic(topic: list[bytes]) -> None:
    assert split_replay([b"", *topic, encode_sequence(7), b"payload"]) == (7, b"payload")
    assert split_replay([b"", *topic, encode_sequence(REPLAY_END), b""]) == (REPLAY_END, b"")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"", encode_sequence(1)],
        [b"", b"", b"", encode_sequence(1), b""],
        [b"delimiter", encode_sequence(1), b""],
        [b"", b"short", b""],
    ],
)
def test_a_replayed_message_of_another_shape_is_malformed(frames: Sequence[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        split_replay(frames)


def test_a_payload_beyond_the_bound_is_malformed_live_or_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop_a, "PAYLOAD_BYTES_MAX", 4)
    assert split_frames([b"", encode_sequence(1), b"1234"]) == (1, b"1234")
    assert split_replay([b"", encode_sequence(1), b"1234"]) == (1, b"1234")
    for split, frames in ((split_frames, [b""]), (split_replay, [b""]), (split_replay, [b"", b""])):
        with pytest.raises(MalformedMessage, match="payload of 5 bytes, at most 4"):
            split([*frames, encode_sequence(1), b"12345"])


def test_the_bound_of_a_payload_has_room_for_a_million_blocks_with_their_tokens() -> None:
    hash_bytes, token_bytes, tokens_a_block = 9, 5, 8
    assert 2**20 * (hash_bytes + tokens_a_block * token_bytes) <= PAYLOAD_BYTES_MAX
