"""KV events of one attention-DP rank, in the JSON shapes of `docs/SOURCES.md` E1.3.

    id          from 0, one more for each event of the rank
    created     once, before all others
    removed     hashes gather until another event or the iteration's end
    visible     at the iteration's end; then the oldest beyond `capacity` are lost

Source: cpp `kvCacheEventManager`, `KVCacheEventSerializer`, by way of `docs/SOURCES.md` E1.3 to E1.5.
"""

from collections import deque
from typing import Any

Json = dict[str, Any]
PRIORITY = 35


class RankEvents:
    """What one rank has to tell. `capacity`: events; `dp_rank` None leaves the rank out, as without attention DP."""

    def __init__(self, window: int, capacity: int, dp_rank: int | None, hash_algo: str | None) -> None:
        self._window, self._capacity = window, capacity
        self._dp_rank = dp_rank
        self._hash_algo = hash_algo
        self._next_id = 0
        self._removed: list[Any] = []
        self._pending: list[Json] = []
        self.visible: deque[Json] = deque()

    def created(self, blocks: list[int]) -> None:
        """Tell of the new pool: primary and secondary blocks."""
        self._enqueue({"type": "created", "num_blocks_per_cache_level": blocks})

    def stored(self, parent: Any, blocks: list[Json]) -> None:
        """Tell of new blocks, in chain order."""
        self._flush_removed()
        self._enqueue({"type": "stored", "parent_hash": parent, "blocks": blocks})

    def removed(self, block_hash: Any) -> None:
        """Tell of a block that is gone."""
        self._removed.append(block_hash)

    def flush(self) -> None:
        """Make the iteration's events visible."""
        self._flush_removed()
        self.visible.extend(self._pending)
        self._pending.clear()
        while len(self.visible) > self._capacity:
            self.visible.popleft()

    def _flush_removed(self) -> None:
        if self._removed:
            hashes, self._removed = self._removed, []
            self._enqueue({"type": "removed", "block_hashes": hashes})

    def _enqueue(self, data: Json) -> None:
        event: Json = {"event_id": self._next_id, "data": data, "window_size": self._window}
        if self._dp_rank is not None:
            event["attention_dp_rank"] = self._dp_rank
        if self._hash_algo is not None:
            event["layer_group_id"] = 0
            event["hash_algo"] = self._hash_algo
        self._next_id += 1
        self._pending.append(event)


def stored_block(
    block_hash: Any, tokens: tuple[int, ...], priority: int, mm_keys: list[Json], cache_salt: str | None
) -> Json:
    """Return a block on the GPU as `stored` has it."""
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "cache_level": 0,
        "priority": priority,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
        "mm_keys": mm_keys,
        "cache_salt": cache_salt,
    }
