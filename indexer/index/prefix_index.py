"""The interface of a prefix index; the reference and the native tree pass the same contract suite.

    facts in      register, store, remove, clear, drop, load, apply_batch       time is an argument
    answers out   overlaps, match, match_many      who holds how much of a prefix
                  digest, bucket_digests           proof of what a rank holds
                  dump, snapshot                   the whole state, of a rank or of all
                  children, holders, prefixes      walking, for people

A sequence hash identifies a block and its whole past, so one node stands for one prefix whoever holds it.

* *Held* is what a rank was told to hold; *reachable* is held with its whole chain. Only reachable blocks match: a rank
  drops out at its first hole, and a refilled hole needs no more.
* A node without holders stays while it has children, so that a refill finds them.
* A stored block whose parent has no node is *parked*: bounded, for a time, counted, never made a root. It is not held
  until its parent has a node. A dump (`load`) is authority: there an unknown parent becomes a node that nobody holds.
* Stores and removals are idempotent; the removal of an unknown block is a counted no-op. The first parent told of a
  block is believed; another one, or one that would close a circle, is counted and not believed.
* Tiers: depth t of a match is the longest prefix whose every block lies on one of the tiers 0..t.
* Memory is bounded: where a store would need more, its new blocks are refused and its rank is *overfull* until it is
  cleared, dropped or loaded without a refusal, or the index restored; a new rank is refused. Removals are always done:
  where they break up what was stored in a row they may pass the limit, by 60 bytes a block at most.
* A time (`now_s`) is finite: where it is not, `store`, `load`, `apply_batch` and `restore` raise `LimitExceeded`, and
  all is as before.

Not thread-safe unless an implementation says so. No method keeps what it was given.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
from typing_extensions import Buffer

from kv_protocol.digest import TierDigest
from kv_protocol.events import Tier
from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns

RANK_MAX = 4095
"""The largest number of a rank; an index serves one rank more than that."""

Hashes = Sequence[int] | Buffer
"""Sequence hashes in chain order: numbers, or u64s in a contiguous buffer (bytes: little-endian)."""

Depths = tuple[int, int, int, int]
"""Overlap blocks on the tiers 0..t, for t = gpu, host, disk, external; never decreasing."""

PrefixOrder = Literal["blocks", "holders", "last_stored"]


class IndexFull(Exception):
    """There is no memory left for another rank."""


class Refusal(NamedTuple):
    """An event of a message that was not (wholly) applied: its place among the events, the byte, and why.

    `refused_blocks` counts those of its blocks for which there was no memory; 0: it was refused for another reason.
    """

    event: int
    offset: int
    reason: str
    refused_blocks: int = 0


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in a row that the same ranks hold on the same tiers, without a fork, as long as can be.

    It ends with the block `sequence_hash`, and begins behind `parent` (None: a sequence's first block, or one whose
    parent is not known). `depth_blocks` counts the blocks of the sequence up to its end, as far back as is known.
    `last_stored_s` is no earlier than the last store of any of its blocks; a stretch that was cut out of a longer one
    may bear the longer one's time.
    """

    sequence_hash: int
    parent: int | None
    blocks: int
    depth_blocks: int
    holders: dict[int, int]
    children: int
    last_stored_s: float


class IndexStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the index holds now, and what it was told and has refused so far (`_total`); in blocks, but for two.

    `ranks` counts ranks. `nodes` counts each block once, held or not; `held_blocks` counts it once for each rank that
    holds it, on whatever tiers. `memory_bytes` is what the limit bounds, the sum of `memory()`. Parked is not held.
    """

    ranks: int
    nodes: int
    held_blocks: int
    parked_blocks: int
    memory_bytes: int
    duplicate_blocks_total: int
    unknown_removals_total: int
    parked_blocks_total: int
    parked_lost_blocks_total: int
    parent_conflicts_total: int
    refused_blocks_total: int


class PrefixIndex(Protocol):
    """Which rank (a small int, the caller's) holds which prefix. An unknown rank is a `KeyError`."""

    def register(self, rank: int, capacity_blocks: int = 0) -> None:
        """`rank` is known, and holds nothing unless it was known before; there is room for `capacity_blocks` more.

        Raises:
            LimitExceeded: `rank` is not in 0..RANK_MAX, or `capacity_blocks` not in 0..2^32-1.
            IndexFull: the rank is new, and memory is used up.
        """

    def store(self, rank: int, parent: int | None, sequence_hashes: Hashes, tier: Tier, now_s: float) -> None:
        """`rank` holds these blocks on `tier`; each is parked while its parent is unknown."""

    def remove(self, rank: int, sequence_hashes: Hashes, tier: Tier) -> None:
        """`rank` does not hold these blocks on `tier` any more, whatever their order."""

    def clear(self, rank: int, tier: Tier | None = None) -> None:
        """`rank` holds nothing on `tier` (None: on any), parked or not."""

    def drop(self, rank: int) -> None:
        """`rank` is unknown; a no-op if it was."""

    def load(self, rank: int, chunks: Iterable[BlockColumns], now_s: float) -> None:
        """`rank` holds exactly the blocks of `chunks`, which come parents first; where a chunk is bad, as before.

        Raises:
            LimitExceeded: a row or the columns of a chunk are not what `BlockColumns` allows.
        """

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:
        """Of the blocks in `buckets` (a set, 32 bytes) `rank` holds exactly those of `chunks`; of others what it held.

        An answer speaks of parked blocks, too: none of the rank's waits any more. It is overfull as it was, or for
        what is refused now.

        Raises:
            LimitExceeded: `buckets` is no such set, or a block of `chunks` is in none of them; all is as before.
        """

    def apply_batch(self, rank: int, message: Buffer, now_s: float) -> list[Refusal]:
        """The events of a message of canonical batches are applied; return those that were not, and why.

        Raises:
            MalformedMessage: the message cannot be cut into batches; nothing was applied.
        """

    def overlaps(self, sequence_hashes: Hashes) -> dict[int, Depths]:
        """Return the depths of every rank that holds at least the first block on some tier."""

    def match(self, sequence_hashes: Hashes, out: Buffer) -> int:
        """`out` holds the depths of every rank; return how many blocks somebody reaches.

        `out` is a writable buffer of int32 with 4 rows of equal length, one column a rank: more columns than the
        largest registered rank; row t counts the blocks on the tiers 0..t. Every number of it is written.

        Raises:
            LimitExceeded: `out` is not so.
        """

    def match_many(self, queries: Sequence[Hashes], out: Buffer) -> None:
        """`out` holds, one after another, what `match` writes for each query.

        Raises:
            LimitExceeded: `out` is not so, or a query is none; `out` may hold some of the answers.
        """

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        """Return the digest of what `rank` holds on `tier`."""

    def bucket_digests(self, rank: int, tier: Tier) -> tuple[int, ...]:
        """Return that digest by the top byte of the sequence hashes: 256 numbers (u64) whose sum is the whole."""

    def dump(self, rank: int, chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
        """Yield what `rank` holds, parents first, in chunks; the index must not change meanwhile."""

    def snapshot(self) -> bytes:
        """Return all that is known of all ranks, parked blocks too; counters are not. See `snapshot.py`."""

    def restore(self, data: Buffer, now_s: float) -> None:
        """The index knows what a snapshot says, and nothing else; parked blocks wait from now, and nobody is overfull.

        Raises:
            MalformedMessage: `data` is no snapshot of a known version, or was damaged; all is as before.
            IndexFull: there is no memory for it; all is as before.
        """

    def children(self, sequence_hash: int | None) -> list[int]:
        """Return the blocks behind a block (None: those without a known parent), ascending; of an unknown one, none."""

    def holders(self, sequence_hash: int) -> dict[int, int]:
        """Return who holds a block: rank -> bits of tiers; nobody holds an unknown one."""

    def prefixes(self, limit: int, order_by: PrefixOrder = "blocks") -> list[Stretch]:
        """Return the first `limit` stretches by what is asked, most first; among equals, the smallest hash first."""

    def expire(self, now_s: float) -> set[int]:
        """Let go of stores whose parent did not come in time; return the ranks that lost some, for a resync."""

    def overfull(self) -> set[int]:
        """Return the ranks of which blocks were refused for want of memory."""

    def memory(self) -> dict[str, int]:
        """Return the bytes in use by part; their sum is what the limit bounds."""

    def structure(self) -> dict[str, int]:
        """Return how many of each thing the index is made of; nothing is left when nothing is held or parked."""

    def statistics(self) -> IndexStatistics:
        """Return what the index holds and has refused."""

    def self_check(self) -> list[str]:
        """Return what in the index contradicts itself: nothing, or it is our bug. Costs a walk over everything."""
