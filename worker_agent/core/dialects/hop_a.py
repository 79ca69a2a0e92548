"""Hop A: the field's own wire from an engine's side, as we write and read it.

    frames  = topic | sequence, 8 bytes big-endian, counts batches of one publisher from 0 | payload
    payload = msgpack [ts (s since 1970), events, dp_rank]; an event is a map with the key `type`
    replay  : to a ROUTER [empty | first sequence wanted]; answers [empty | topic | sequence | payload], one a batch
              that is still there, then the end marker: sequence 2^64 - 1, empty payload

Hashes are the engine's own, i64 on the wire, u64 inside. Source: `event_plane.md` sections 3.1, 3.2, 3.6.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import Tier
from kv_protocol.hashing import to_i64, to_u64
from kv_protocol.ids import TokenId
from worker_agent.core.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored

REPLAY_END = (1 << 64) - 1
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024
"""A batch of 2^20 blocks with their tokens: more than any engine flushes at once; a bound on what we decode."""
TIME_S_MAX = 9e9
"""The year 2255; about the last that an i64 of nanoseconds can say."""
_SEQUENCE_BYTES = 8
_FRAMES = 3

TIER_OF_MEDIUM = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "DEVICE": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
}
MEDIUM_OF_TIER = {Tier.GPU: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.EXTERNAL: "EXTERNAL"}


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[TokenId]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_payload_decoder = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw], int | None])
_event_decoder = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_encode = msgspec.msgpack.Encoder().encode


def encode_payload(time_s: float, events: Sequence[EngineEvent], dp_rank: int) -> bytes:
    """Return the payload frame of one batch."""
    return _encode([time_s, [_wire(event) for event in events], dp_rank])


def _wire(event: EngineEvent) -> dict[str, Any]:
    if isinstance(event, EngineCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [to_i64(block_hash) for block_hash in event.block_hashes]
    medium = MEDIUM_OF_TIER[event.tier]
    if isinstance(event, EngineRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    wire: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent_block_hash is None else to_i64(event.parent_block_hash),
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "medium": medium,
    }
    if event.lora_name:
        wire["lora_name"] = event.lora_name
    if event.cache_salt:
        wire["cache_salt"] = event.cache_salt
    return wire


def encode_sequence(sequence: int) -> bytes:
    """Return the sequence frame."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; raise `MalformedMessage` where it is none."""
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


def decode_payload(sequence: int, payload: bytes) -> EngineBatch:
    """Return what a payload says; an unreadable event is named in `refused` and costs nothing else.

    Raises:
        MalformedMessage: the batch itself is not one.
    """
    try:
        time_s, raw_events, dp_rank = _payload_decoder.decode(payload)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"batch {sequence}: {error}") from error
    if not 0 <= time_s <= TIME_S_MAX:
        raise MalformedMessage(0, f"batch {sequence}: ts {time_s}, allowed 0..{TIME_S_MAX:.0f} s since 1970")
    events, refused = [], []
    for raw in raw_events:
        try:
            events.append(_event(_event_decoder.decode(raw)))
        except UNDECODABLE as error:
            refused.append(str(error))
    return EngineBatch(sequence=sequence, time_s=time_s, dp_rank=dp_rank, events=tuple(events), refused=tuple(refused))


def _event(wire: _Stored | _Removed | _Cleared) -> EngineEvent:
    if isinstance(wire, _Cleared):
        return EngineCleared()
    if wire.medium not in TIER_OF_MEDIUM:
        raise LimitExceeded("medium", wire.medium, ", ".join(str(medium) for medium in TIER_OF_MEDIUM))
    tier = TIER_OF_MEDIUM[wire.medium]
    hashes = tuple(to_u64(block_hash) for block_hash in wire.block_hashes)
    if isinstance(wire, _Removed):
        return EngineRemoved(block_hashes=hashes, tier=tier)
    parent = None if wire.parent_block_hash is None else to_u64(wire.parent_block_hash)
    return EngineStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tuple(wire.token_ids),
        block_size=wire.block_size,
        tier=tier,
        lora_name=wire.lora_name,
        cache_salt=wire.cache_salt,
    )
