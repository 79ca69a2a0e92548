"""A trace as a schedule for the index bench: the rank of each request and its evictions are fixed before the run.

Each of some ranks has an LRU cache of blocks. A request goes to the rank with the longest prefix of it (among equals,
any), every `STRAY`-th on average to any rank, so that prefixes are held by several. The prompt's blocks are then the
rank's most recently used, the last first: a block goes before its parent.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from bench.index.data import ScheduledRequest, chain, last, numbers, pack
from bench.prefix_tree import PrefixTree
from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest

STRAY = 4


class ScheduleShape(NamedTuple):
    """How many ranks, and the tokens of one cache; a block is `block_size` tokens, which divides 512."""

    ranks: int = 16
    cache_tokens: int = 700_000
    block_size: int = 32
    seed: int = 1

    @property
    def cache_blocks(self) -> int:
        """The full blocks of one cache."""
        return self.cache_tokens // self.block_size


def schedule(trace: Sequence[TraceRequest], shape: ScheduleShape) -> Iterator[ScheduledRequest]:
    """Yield the requests of a schedule."""
    draw = random.Random(shape.seed)  # noqa: S311 - a workload, not a secret
    caches = [PrefixTree() for _ in range(shape.ranks)]
    for request in trace:
        if not (hashes := sequence_hashes(request, shape.block_size)):
            continue
        blocks = numbers(hashes)
        hits = [cache.depth(blocks) for cache in caches]
        longest = [rank for rank, hit in enumerate(hits) if hit == max(hits)]
        rank = draw.choice(longest) if draw.randrange(STRAY) else draw.randrange(shape.ranks)
        caches[rank].insert(blocks)
        yield ScheduledRequest(rank, hits[rank], hashes, pack(caches[rank].evict(shape.cache_blocks)))


def sequence_hashes(request: TraceRequest, block_size: int) -> bytes:
    """Return a hash of every full block, equal for equal prefixes."""
    hashes: list[bytes] = []
    parent = 0
    for block_id in islice(request.block_ids, -(-request.isl_tokens // TRACE_BLOCK_TOKENS)):
        hashes.append(chain(parent, block_id, TRACE_BLOCK_TOKENS // block_size))
        parent = last(hashes[-1])
    return b"".join(hashes)[: 8 * (request.isl_tokens // block_size)]
