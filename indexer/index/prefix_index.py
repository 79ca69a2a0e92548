"""The interface of a prefix index; the index and its reference in the tests pass one contract suite.

    changes       register, store, remove, clear, drop, load, repair, apply_batch       time is an argument
    queries       match                            ranks' overlap with a prefix
                  digest, bucket_digests           digests of a rank's blocks
                  dump, snapshot                   the complete state, of a rank or of all
                  children, holders                the neighbours and the holders of one block
                  outline, chain                   for display: all chains without forks (`Outline`), or part of one

A sequence hash identifies a block and all before it, so the index has one node for a prefix, whoever holds it.

* A rank *holds* a block that it stored. The block is *reachable* if the rank holds its whole chain. Only reachable
  blocks match: a rank's match ends before the first block that it lacks, and goes on once that block is stored.
* A node without holders stays while it has children, so that storing its block again restores their chain.
* A parent that has no node gets one, without holders and without a known parent, until its own store comes.
* Stores and removals are idempotent; the removal of an unknown block is a counted no-op. The first parent of a block
  stays; a different one, or one that would close a cycle, is counted and ignored.
* Tiers: depth t of a match is the longest prefix with every block on one of the tiers 0..t.
* Memory is bounded: at the limit, new ranks and new blocks are refused. `store`, `load`, `repair` and `apply_batch`
  return the number of refused blocks: a chain's first block without room, and those behind it that are not held.
  Removals are always done, even at the limit, and may exceed it: the native index keeps blocks in runs with the same
  holders, and a removal in the middle of a run adds up to two runs of 48 bytes each, and a set of holders if it is new.

An *outline* is the shape of the index at one moment, for people; it never changes. A node of it is a row of blocks
without a fork, whichever ranks hold them; the root is no node. The root's children begin sequences, or their parents
are unknown. A node's heat is the sum of the heat of all requests that end in the node or behind it.

Arguments are not checked, except for unknown ranks: hashes must be u64s, tiers exist, times be finite. Not thread-safe
unless an implementation says so. No method keeps a reference to its arguments.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import msgspec
from typing_extensions import Buffer

from kv_protocol.digest import TierDigest
from kv_protocol.events import Tier
from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns

RANKS_MAX = 4096
"""The most ranks of one index, which are numbered from 0 on; further ones are refused and counted."""

Hashes = Sequence[int] | bytes
"""Sequence hashes in chain order: numbers, or little-endian u64s as `bytes`. No other buffer (`array`) is allowed."""

Depths = tuple[int, int, int, int]
"""Overlap blocks on the tiers 0..t, for t = gpu, host, disk, external; never decreasing."""


class IndexFull(Exception):
    """There is no memory for another rank, or for a snapshot."""


class IndexStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Present state, and counts so far (`_total`), in blocks, except for `ranks` and `memory_bytes`.

    `nodes` counts each block once, held or not; `held_blocks` counts it once for each holder, on whichever tiers.
    `memory_bytes` is the sum of `memory()`, which the limit bounds.
    """

    ranks: int
    nodes: int
    held_blocks: int
    memory_bytes: int
    duplicate_blocks_total: int
    unknown_removals_total: int
    parent_conflicts_total: int
    refused_blocks_total: int


OutlineOrder = Literal["subtree", "heat", "recent", "blocks"]
OUTLINE_ORDERS: tuple[OutlineOrder, ...] = get_args(OutlineOrder)
"""How children are sorted, in this order: by blocks in the subtree, heat, newest store in the node, blocks in it."""


class PassedRequest(NamedTuple):
    """A request that went through the blocks up to `sequence_hash`: its weight, and when it came (above 0)."""

    sequence_hash: int
    heat: float
    used_s: float


class OutlineNode(NamedTuple):
    """One node. `subtree_blocks` counts its blocks and all behind; `depth_blocks` those from the root to `last`.

    `used_s` is the newest request's time; 0: no request. `stored_s` is the time of the newest store in the node, or a
    later one: a part that was split off keeps the time of the whole.
    """

    first: int
    last: int
    blocks: int
    subtree_blocks: int
    depth_blocks: int
    children: int
    heat: float
    used_s: float
    stored_s: float


class Outline(Protocol):
    """The nodes of an index; `len` counts them. A node is named by a number of this outline; None is the root."""

    @property
    def blocks(self) -> int:
        """The blocks in all nodes."""

    @property
    def skipped_blocks(self) -> int:
        """Blocks that moved while the outline was made, and are in none of its nodes."""

    def __len__(self) -> int:
        """Return the number of nodes."""

    def find(self, last: int) -> int | None:
        """Return the node that ends with this block; None if none does."""

    def child_count(self, node: int | None) -> int:
        """Return how many children the node has."""

    def children(self, node: int | None, order_by: OutlineOrder, offset: int, limit: int) -> Sequence[OutlineNode]:
        """Return the node's children in descending order, equal ones by ascending `first`, from `offset` on."""

    def path(self, node: int, limit: int) -> Sequence[OutlineNode]:
        """Return the node and those above it, the node first; at most `limit`."""


class PrefixIndex(Protocol):
    """The prefixes of ranks (small ints chosen by the caller). An unknown rank raises `KeyError`."""

    def register(self, rank: int, capacity_blocks: int = 0) -> None:
        """Add `rank` without blocks, unless it is known; reserve memory for `capacity_blocks` blocks of it.

        Raises:
            IndexFull: the rank is new, and there is no memory.
        """

    def store(self, rank: int, parent: int | None, sequence_hashes: Hashes, tier: Tier, now_s: float) -> int:
        """Add these blocks of `rank` on `tier`: a chain behind `parent`; None: a chain that begins a sequence."""

    def remove(self, rank: int, sequence_hashes: Hashes, tier: Tier) -> None:
        """Remove these blocks of `rank` on `tier`, in any order."""

    def clear(self, rank: int, tier: Tier | None = None) -> None:
        """Remove all blocks of `rank` on `tier` (None: on all tiers)."""

    def drop(self, rank: int) -> None:
        """Remove `rank`; no effect if it is unknown."""

    def load(self, rank: int, chunks: Iterable[BlockColumns], now_s: float) -> int:
        """Replace the blocks of `rank` by those of `chunks`, parents first."""

    def repair(self, rank: int, buckets: bytes, chunks: Iterable[BlockColumns], now_s: float) -> int:
        """Replace the blocks of `rank` in `buckets` (32 bytes, a bit for each bucket) by those of `chunks`.

        All blocks of `chunks` must be in these buckets.
        """

    def apply_batch(self, rank: int, message: bytes, now_s: float) -> int:
        """Apply the events of a message of canonical batches.

        Raises:
            MalformedMessage: the codec would not decode the message; nothing was applied.
        """

    def match(self, sequence_hashes: Hashes, out: Buffer, ranks: bytes | None = None) -> int:
        """Write the depths of every rank to `out`; return the largest depth of any rank.

        `out` is a writable buffer of int32 with 4 rows of equal length, one column a rank; row t counts the blocks on
        the tiers 0..t. All of it is written. `ranks` names the rank of each column, as u32s; a rank that is not
        registered has depth 0. None: column i is of rank i, and every registered rank must have a column.
        """

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        """Return the digest of the blocks of `rank` on `tier`."""

    def bucket_digests(self, rank: int, tier: Tier) -> tuple[int, ...]:
        """Return a digest (u64) for each of the 256 top bytes of sequence hashes.

        Their sum mod 2^64 is the rank's digest on this tier.
        """

    def dump(self, rank: int, chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
        """Yield the blocks of `rank`, parents first, in chunks; the index must not change meanwhile."""

    def snapshot(self) -> bytes:
        """Return the state of all ranks, without counters. See `snapshot.py`."""

    def restore(self, data: Buffer) -> None:
        """Replace the state by a snapshot's.

        Raises:
            MalformedMessage: `data` is no snapshot of a known version, or is damaged; nothing changed.
            IndexFull: there is no memory for it; nothing changed.
        """

    def children(self, sequence_hash: int | None) -> list[int]:
        """Return a block's children (None: blocks without a known parent), ascending; none for an unknown block."""

    def holders(self, sequence_hash: int) -> dict[int, int]:
        """Return the holders of a block: rank -> bits of tiers; empty for an unknown block."""

    def outline(self, requests: Sequence[PassedRequest] = ()) -> Outline:
        """Return the shape of the index with the heat of `requests`; those of unknown blocks do not count."""

    def chain(self, sequence_hash: int, limit: int) -> bytes:
        """Return this block and those behind it up to the first fork, as packed u64s; none for an unknown block.

        At most `limit` blocks are returned.
        """

    def memory(self) -> dict[str, int]:
        """Return the bytes in use by part; their sum is what the limit bounds."""

    def structure(self) -> dict[str, int]:
        """Return the number of internal objects by kind; all 0 when nothing is held."""

    def statistics(self) -> IndexStatistics:
        """Return the present state and the counts."""
