"""The implementations of a prefix index, and words for what is asked of each of them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from typing_extensions import Buffer

from indexer.index.prefix_index import Depths, Hashes, PrefixIndex
from indexer.native._core import SharedRegion
from indexer.native.index import NativeIndex
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock, block_columns
from kv_protocol.splitmix import splitmix64
from tests.reference.index.index import ReferenceIndex

GPU, HOST, DISK, EXTERNAL = TIERS
U64_MAX = 2**64 - 1
TTL_S = 5.0
REGION_BYTES = 256 << 20


class MakeIndex(Protocol):
    def __call__(
        self, *, parked_blocks_max: int = ..., parked_ttl_s: float = ..., memory_bytes_max: int = ...
    ) -> PrefixIndex: ...


class SharedNativeIndex(NativeIndex):
    """The native index in memory that processes share, matched against as its readers do."""

    def __init__(
        self, *, parked_blocks_max: int = 65_536, parked_ttl_s: float = 5.0, memory_bytes_max: int = 0
    ) -> None:
        region = SharedRegion(2, memory_bytes_max or REGION_BYTES)
        region.begin_writing()
        super().__init__(
            parked_blocks_max=parked_blocks_max,
            parked_ttl_s=parked_ttl_s,
            memory_bytes_max=memory_bytes_max,
            region=region,
        )
        self.publish()
        self.reader = region.reader(1)

    def match(self, sequence_hashes: Hashes, out: Buffer) -> int:
        _, _, needed = self.reader.match(sequence_hashes, out)
        depths = np.frombuffer(memoryview(out), dtype=np.int32)
        if len(depths) // len(TIERS) < needed:
            return super().match(sequence_hashes, out)  # refuses
        return int(depths[-(len(depths) // len(TIERS)) :].max(initial=0)) if needed else 0

    def match_many(self, queries: Sequence[Hashes], out: Buffer) -> None:
        super().match_many(queries, out)
        rows = memoryview(out).cast("B")
        for at, query in enumerate(queries):
            bytes_each = rows.nbytes // len(queries)
            self.match(query, rows[at * bytes_each : (at + 1) * bytes_each].cast("i"))


IMPLEMENTATIONS: dict[str, MakeIndex] = {
    "python": ReferenceIndex,
    "native": NativeIndex,
    "native shared": SharedNativeIndex,
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
