"""Events of hop A to write tests with: as engines say them, and as we read them."""

from typing import Any

import msgspec

from worker_agent.events.dialects.batches import BatchDecoder
from worker_agent.events.engine_events import EngineBatch, EngineRemoved, EngineStored

GOOD = EngineRemoved(block_hashes=(9,))
GOOD_MAP = {"type": "BlockRemoved", "block_hashes": [9]}


def stored(
    *hashes: int, parent: int | None = None, block_size: int = 4, is_eagle: bool = False, **fields: Any
) -> EngineStored:
    """Return a store whose tokens count up from 1."""
    return EngineStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tuple(range(1, block_size * len(hashes) + is_eagle + 1)),
        block_size=block_size,
        is_eagle=is_eagle,
        **fields,
    )


def stored_map(**changes: object) -> dict[str, object]:
    """Return a readable store of one block of 4 tokens, with changes."""
    return {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        **changes,
    }


def stored_array(*later: object, **changes: object) -> list[object]:
    """Return the same as an array, with slots behind `block_size`."""
    return [*stored_map(**changes).values(), *later]


def wire(*events: object, time_s: object = 1.5, dp_rank: object = 0) -> bytes:
    """Return a payload of events as they come, right or wrong."""
    return msgspec.msgpack.encode([time_s, list(events), dp_rank])


def ignored(decoder: BatchDecoder) -> int:
    """Return how many events the decoder has ignored."""
    return sum(count for kind, count in decoder.counts.items() if kind.startswith("ignored"))


def read(*events: object, decoder: BatchDecoder | None = None) -> EngineBatch:
    """Return what a payload of these events says."""
    return (decoder or BatchDecoder()).decode(5, wire(*events, dp_rank=2))
