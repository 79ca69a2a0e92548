"""TensorRT-LLM's polled events, as its JSON has them, right or wrong, and what is published of them."""

from collections.abc import Iterable
from typing import Any

from worker_agent.events.engine_events import EngineEvent, EngineRemoved, EngineStored, RankEvent

BLOCK_SIZE = 4
Json = dict[str, Any]


def event(event_id: int, data: object, **fields: object) -> Json:
    return {"event_id": event_id, "data": data, **fields}


def numbered(*data: object, first: int = 0, **fields: object) -> list[Json]:
    return [event(first + at, each, **fields) for at, each in enumerate(data)]


def created() -> Json:
    return {"type": "created", "num_blocks_per_cache_level": [100, 0]}


def block(block_hash: object, tokens: Iterable[object] = (1, 2, 3, 4), **fields: object) -> Json:
    rendered = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": rendered,
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
        **fields,
    }


def stored(*blocks: Json, parent: object = None, **fields: object) -> Json:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks), **fields}


def removed(*hashes: object) -> Json:
    return {"type": "removed", "block_hashes": list(hashes)}


def diff(old: object, new: object) -> Json:
    return {"type": "event_diff", "new_value": new, "old_value": old}


def updated(block_hash: object, level: Json | None = None, priority: Json | None = None) -> Json:
    return {"type": "updated", "block_hash": block_hash, "cache_level": level, "priority": priority}


def of_rank(dp_rank: int, *events: EngineEvent) -> list[RankEvent]:
    return [RankEvent(dp_rank, each) for each in events]


def of_rank_0(*events: EngineEvent) -> list[RankEvent]:
    return of_rank(0, *events)


def store(*hashes: int, parent: int | None = None, **fields: Any) -> EngineStored:
    """Return what is published of blocks of the tokens 1 to 4."""
    return EngineStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=(1, 2, 3, 4) * len(hashes),
        block_size=BLOCK_SIZE,
        **fields,
    )


def named(block_hash: int, **fields: Any) -> EngineStored:
    """Return what is published of a block that came to a tier."""
    return EngineStored(block_hashes=(block_hash,), parent_block_hash=None, token_ids=(), block_size=0, **fields)


def gone(*hashes: int, **fields: Any) -> EngineRemoved:
    return EngineRemoved(block_hashes=hashes, **fields)
