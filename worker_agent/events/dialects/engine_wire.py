"""The wire of engine events: frames, and payloads as this project writes them (`batches.py` reads all dialects).

    frames  = topic | sequence, 8 bytes big-endian, counts batches of one publisher from 0 | payload
    payload = msgpack [ts (s since 1970), events, dp_rank]; an event is a map with the key `type`
    replay  : to a ROUTER [empty | first sequence wanted]; answers [empty | topic | sequence | payload], one a batch
              that is still there, then the end marker: sequence 2^64 - 1, empty payload

Hashes are the engine's own, i64 on the wire, u64 inside. Eagle's tokens are written as pairs of neighbours; names of
blocks without their tokens, as no tokens. Source: `docs/SOURCES.md` E3.1, E3.2, E3.6.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kv_protocol.errors import MalformedMessage
from kv_protocol.hashing import to_i64
from worker_agent.events.dialects.media import MEDIUM_OF_TIER
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

REPLAY_END = (1 << 64) - 1
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024
"""A batch of 2^20 blocks with their tokens: more than any engine flushes at once; a bound on decoded payloads."""
_SEQUENCE_BYTES = 8
_FRAMES = 3

_encode = msgspec.msgpack.Encoder().encode


def encode_payload(time_s: float, events: Sequence[EngineEvent], dp_rank: int) -> bytes:
    """Return the payload frame of one batch."""
    return _encode([time_s, [_wire(event) for event in events], dp_rank])


def _wire(event: EngineEvent) -> dict[str, Any]:
    match event:
        case EngineStored():
            return _stored(event)
        case EngineRemoved():
            hashes = [to_i64(block_hash) for block_hash in event.block_hashes]
            return {"type": "BlockRemoved", "block_hashes": hashes, **_place(event)}
        case EngineCleared():
            return {"type": "AllBlocksCleared"}


def _stored(event: EngineStored) -> dict[str, Any]:
    parent = event.parent_block_hash
    wire = {
        "type": "BlockStored",
        "block_hashes": [to_i64(block_hash) for block_hash in event.block_hashes],
        "parent_block_hash": None if parent is None else to_i64(parent),
        "token_ids": tuple(pairwise(event.token_ids)) if event.is_eagle else event.token_ids,
        "block_size": event.block_size,
        **_place(event),
    }
    if event.lora_name:
        wire["lora_name"] = event.lora_name
    if event.cache_salt:
        wire["cache_salt"] = event.cache_salt
    if any(event.mm_hashes):
        wire["block_mm_infos"] = [_mm_info(mm_hashes) for mm_hashes in event.mm_hashes]
    return wire


def _place(event: EngineStored | EngineRemoved) -> dict[str, Any]:
    place: dict[str, Any] = {"medium": MEDIUM_OF_TIER[event.tier]}
    if event.group_idx:
        place |= {"group_idx": event.group_idx, "kv_cache_spec_kind": "full_attention"}  # else readers ignore it
    return place


def _mm_info(mm_hashes: tuple[int, ...]) -> dict[str, Any] | None:
    return {"mm_objects": [{"mm_hash": mm_hash, "offsets": []} for mm_hash in mm_hashes]} if mm_hashes else None


def encode_sequence(sequence: int) -> bytes:
    """Return the sequence frame."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; raise `MalformedMessage` if it is not one."""
    if len(frame) != _SEQUENCE_BYTES:
        raise MalformedMessage(0, f"sequence frame of {len(frame)} bytes, {_SEQUENCE_BYTES} needed")
    return int.from_bytes(frame, "big")


def split_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a published message; raise `MalformedMessage` for other shapes."""
    if len(frames) != _FRAMES:
        raise MalformedMessage(0, f"{len(frames)} frames, {_FRAMES} needed: topic, sequence, payload")
    return decode_sequence(frames[1]), _bounded(frames[2])


def split_replay(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a replayed message, with or without its topic; raise `MalformedMessage`."""
    if len(frames) not in (_FRAMES, _FRAMES + 1) or frames[0]:
        raise MalformedMessage(0, f"{len(frames)} frames, 3 or 4 needed: empty, [topic], sequence, payload")
    return decode_sequence(frames[-2]), _bounded(frames[-1])


def _bounded(payload: bytes) -> bytes:
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MalformedMessage(0, f"payload of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX} allowed")
    return payload
