"""`NativeIndex`: the prefix index in C++. What is called often is the extension's own; the rest is given its form here.

It may be used from several threads: each call holds a lock, and `apply_batch`, `load`, `repair`, `dump`, `snapshot` and
`restore` let other threads of Python run.
"""

from collections.abc import Iterable, Iterator

from typing_extensions import Buffer

from indexer.index import snapshot
from indexer.index.buffers import (
    ORDERS,
    checked_buckets,
    checked_capacity,
    checked_limit,
    checked_order,
    checked_rank,
    checked_rows,
)
from indexer.index.prefix_index import IndexStatistics, PrefixOrder, Refusal, Stretch
from indexer.native._core import Tree
from kv_protocol.digest import TierDigest
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.events import Tier
from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns


class NativeIndex(Tree):
    """Which rank holds which prefix: a `PrefixIndex`.

    `memory_bytes_max` is in bytes; 0: no limit. `seed` (u64) decides where blocks lie in the map from hashes to blocks,
    and nothing else: drawn at random by who serves requests, it cannot be guessed by who makes prompts.
    """

    def __init__(
        self,
        *,
        parked_blocks_max: int = 65_536,
        parked_ttl_s: float = 5.0,
        memory_bytes_max: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(parked_blocks_max, parked_ttl_s, memory_bytes_max, seed)

    def register(self, rank: int, capacity_blocks: int = 0) -> None:
        """`rank` is known; the map is made large for all capacities, up to 2^27 blocks and a quarter of the memory."""
        self._add_rank(checked_rank(rank), checked_capacity(capacity_blocks))

    def apply_batch(self, rank: int, message: Buffer, now_s: float) -> list[Refusal]:
        """The events of a message are applied; return those that were not, and why."""
        refused = self._apply_batch(rank, message, now_s)
        return [Refusal(*each) for each in refused] if refused else []

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:
        """Of the blocks in `buckets` `rank` holds exactly those of `chunks`, and none is parked; others as before."""
        named = checked_buckets(buckets)
        self._repair(rank, named, checked_rows(chunks, named), now_s)

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        """Return the digest of what `rank` holds on `tier`."""
        return TierDigest(tier, *self._digest(rank, tier))

    def dump(self, rank: int, chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
        """Return what `rank` holds now, parents first, in chunks."""
        if chunk_blocks < 1:
            raise LimitExceeded("chunk_blocks", chunk_blocks, "1 or more")
        return iter([BlockColumns(*columns) for columns in self._dump(rank, chunk_blocks)])

    def snapshot(self) -> bytes:
        """Return all that is known of all ranks, parked blocks too."""
        return snapshot.seal(self._snapshot())

    def restore(self, data: Buffer, now_s: float) -> None:
        """The index knows what a snapshot says, and nothing else."""
        body = snapshot.unseal(data)
        try:
            self._restore(bytes(body), now_s)
        except MalformedMessage as error:
            raise MalformedMessage(snapshot.HEAD_BYTES + error.offset, error.reason) from None

    def prefixes(self, limit: int, order_by: PrefixOrder = "blocks") -> list[Stretch]:
        """Return the first `limit` stretches by what is asked, most first."""
        found = self._stretches(checked_limit(limit), ORDERS.index(checked_order(order_by)))
        return [Stretch(**dict(zip(Stretch.__struct_fields__, row, strict=True))) for row in found]

    def statistics(self) -> IndexStatistics:
        """Return what the index holds and has refused."""
        return IndexStatistics(**dict(zip(IndexStatistics.__struct_fields__, self._figures(), strict=True)))
