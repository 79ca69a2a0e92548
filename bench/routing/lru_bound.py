"""The bound: what one cache of the fleet's total size would have saved, had it seen every request, one after another.

    hit       the longest prefix of the prompt's reusable blocks that the cache holds at the request's arrival
    touch     the prompt's full blocks, the last first: so a block is always evicted before its parent
    evict     the block touched longest ago, while there are more than the cache can hold

It ignores what costs a real fleet: several caches hold the same block, a block is there only once computed, running
requests pin theirs, and answers take room. Least-recently-used is not the best of all rules, so the bound is one of
placement, not of caching.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class LruCache:
    """Prefix blocks by sequence hash, at most `blocks_max`."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, hashes: Sequence[int], reusable_blocks: int) -> int:
        """Return how many of a prompt's first `reusable_blocks` were held; all of `hashes` were used just now."""
        hit = next((depth for depth, each in enumerate(hashes[:reusable_blocks]) if each not in self._blocks), None)
        for each in reversed(hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return min(reusable_blocks, len(hashes)) if hit is None else hit


def lru_hit_rate(prompts: Iterable[tuple[int, Sequence[int]]], *, blocks_max: int, block_size: int) -> float:
    """Return the share of prompt tokens that one cache gives; `prompts` are (tokens, hashes of all full blocks)."""
    cache = LruCache(blocks_max)
    hit_blocks = tokens = 0
    for isl_tokens, hashes in prompts:
        hit_blocks += cache.take(hashes, (isl_tokens - 1) // block_size)
        tokens += isl_tokens
    return hit_blocks * block_size / tokens if tokens else 0.0
