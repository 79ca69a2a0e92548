"""The implementations of a prefix index, and words for what is asked of each of them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from indexer.index.prefix_index import RANK_MAX, Depths, Hashes, PrefixIndex
from indexer.native.index import NativeIndex
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock, block_columns
from kv_protocol.splitmix import splitmix64
from tests.reference.index.index import ReferenceIndex

GPU, HOST, DISK, EXTERNAL = TIERS
U64_MAX = 2**64 - 1
TTL_S = 5.0


class MakeIndex(Protocol):
    def __call__(
        self, *, parked_blocks_max: int = ..., parked_ttl_s: float = ..., memory_bytes_max: int = ...
    ) -> PrefixIndex: ...


IMPLEMENTATIONS: dict[str, MakeIndex] = {
    "python": ReferenceIndex,
    "native": NativeIndex,
}


def with_ranks(index: PrefixIndex, ranks: int = 3) -> PrefixIndex:
    for rank in range(ranks):
        index.register(rank)
    return index


def chain(length: int, seed: int = 1) -> list[int]:
    """Return a prefix of `length` blocks, whose hashes fall into all buckets of a digest."""
    return [splitmix64(seed * 1_000_000 + at) for at in range(length)]


def both(blocks: int) -> Depths:
    return (blocks,) * 4


def overlaps(index: PrefixIndex, hashes: Hashes) -> dict[int, Depths]:
    """Return the depths of every rank that holds at least the first block on some tier."""
    out = np.empty((len(TIERS), RANK_MAX + 1), np.int32)
    index.match(hashes, out.data)
    return {int(rank): tuple(out[:, rank].tolist()) for rank in out[-1].nonzero()[0]}


def dumped(index: PrefixIndex, rank: int) -> list[HeldBlock]:
    return [block for columns in index.dump(rank) for block in columns.blocks()]


def load(index: PrefixIndex, rank: int, rows: Iterable[HeldBlock], now_s: float = 0) -> None:
    index.load(rank, block_columns(rows), now_s)


def held(index: PrefixIndex, rank: int) -> dict[int, tuple[int | None, int]]:
    return {block.sequence_hash: (block.parent, block.tier_bits) for block in dumped(index, rank)}


def is_proven(index: PrefixIndex, rank: int) -> bool:
    """Whether the digests are those of what the dump says, and nothing contradicts itself."""
    blocks = dumped(index, rank)
    return not index.self_check() and all(
        index.digest(rank, tier)
        == SetDigest(block.sequence_hash for block in blocks if tier in block.tiers).of_tier(tier)
        for tier in TIERS
    )


def is_parents_first(blocks: Sequence[HeldBlock]) -> bool:
    place = {block.sequence_hash: at for at, block in enumerate(blocks)}
    return all(place.get(block.parent, -1) < at for at, block in enumerate(blocks) if block.parent is not None)


def forest(index: PrefixIndex) -> list[list[int]]:
    """Rank 0 holds two trees with forks, on several tiers, with a hole; return its paths."""
    trunk, left, right, other = chain(4), chain(3, seed=2), chain(2, seed=3), chain(3, seed=4)
    index.store(0, None, trunk, GPU, 0)
    index.store(0, trunk[1], left, HOST, 0)
    index.store(0, left[0], right, GPU, 0)
    index.store(0, None, other, DISK, 0)
    index.store(0, None, trunk[:2], HOST, 0)
    index.remove(0, [other[1]], DISK)
    index.remove(0, [trunk[0]], GPU)
    return [trunk, trunk[:2] + left, trunk[:2] + left[:1] + right, other]
