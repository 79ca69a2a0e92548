"""Payloads of engine events, written as engines write them; for benches and tests (agents only read them).

Hashes are the engine's own, i64 on the wire, u64 inside. EAGLE's tokens are written as pairs of neighbours. Blocks
that an event names without tokens get an empty list. Source: `docs/SOURCES.md` E3.1, E3.2.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kv_protocol.events import Tier
from kv_protocol.hashing import to_i64
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

MEDIUM_OF_TIER = {Tier.GPU: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.EXTERNAL: "EXTERNAL"}

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
    wire |= {field: text for field, text in event.namespace._asdict().items() if text}
    if any(event.mm_hashes):
        wire["block_mm_infos"] = [_mm_info(mm_hashes) for mm_hashes in event.mm_hashes]
    return wire


def _place(event: EngineStored | EngineRemoved) -> dict[str, Any]:
    place: dict[str, Any] = {"medium": MEDIUM_OF_TIER[event.tier]}
    if event.group_idx:
        place |= {"group_idx": event.group_idx, "kv_cache_spec_kind": "full_attention"}  # readers need the kind
    return place


def _mm_info(mm_hashes: tuple[int, ...]) -> dict[str, Any] | None:
    return {"mm_objects": [{"mm_hash": mm_hash, "offsets": []} for mm_hash in mm_hashes]} if mm_hashes else None
