"""`ReferenceIndex`: the prefix index in plain Python, exact, and its outline.

The rules are those of `indexer/index/prefix_index.py`; the data structures are in `tree.py`. A match walks from the
first block; a rank drops out at its first hole.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest

from typing_extensions import Buffer

from indexer.index.prefix_index import Depths, Hashes, IndexStatistics, OutlineNode, OutlineOrder, PassedRequest
from indexer.index.snapshot import seal, unseal
from kv_protocol.codec import decode_message, pack_u64, unpack_u64
from kv_protocol.digest import TierDigest, is_in_buckets
from kv_protocol.events import TIERS, Event, Removed, Stored, Tier
from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns, HeldBlock, block_columns
from tests.reference.index.nodes import Forest, parents_first, ranks_of
from tests.reference.index.snapshot import children_of, read_body, saved, write_body
from tests.reference.index.tree import ReferenceTree

_MOST: dict[OutlineOrder, Callable[[OutlineNode], float]] = {
    "subtree": lambda node: node.subtree_blocks,
    "heat": lambda node: node.heat,
    "recent": lambda node: node.stored_s,
    "blocks": lambda node: node.blocks,
}


class ReferenceOutline:
    """An `Outline`, made in one walk. Nodes are in breadth-first order: children behind their parents."""

    skipped_blocks = 0

    def __init__(self, forest: Forest, requests: Iterable[PassedRequest]) -> None:
        self.blocks = len(forest)
        self._parents: list[int | None] = []
        self._children: dict[int | None, list[int]] = {None: []}
        chains = self._walk(forest)
        self._nodes = self._rows(forest, chains, list(requests))
        self._by_last = {node.last: number for number, node in enumerate(self._nodes)}

    def _walk(self, forest: Forest) -> list[list[int]]:
        """Return the chain of each node, and note parents and children."""
        behind: dict[int | None, list[int]] = {}
        for block, node in forest.items():
            behind.setdefault(node.parent, []).append(block)
        chains: list[list[int]] = []
        pending: list[tuple[int, int | None]] = [(block, None) for block in behind.get(None, ())]
        for first, parent in pending:  # which grows meanwhile
            chain, after = [first], behind.get(first, [])
            while len(after) == 1:
                chain.append(after[0])
                after = behind.get(chain[-1], [])
            number = len(chains)
            chains.append(chain)
            self._parents.append(parent)
            self._children[parent].append(number)
            self._children[number] = []
            pending += [(block, number) for block in after]
        return chains

    def _rows(self, forest: Forest, chains: list[list[int]], requests: list[PassedRequest]) -> list[OutlineNode]:
        number_of = {block: number for number, chain in enumerate(chains) for block in chain}
        subtree, heat, used_s = [len(chain) for chain in chains], Counter[int](), Counter[int]()
        depths: list[int] = []
        for request in requests:
            if (number := number_of.get(request.sequence_hash)) is not None:
                heat[number] += request.heat  # type: ignore[assignment]  # a float
                used_s[number] = max(used_s[number], request.used_s)  # type: ignore[assignment]
        for number, parent in enumerate(self._parents):
            depths.append(len(chains[number]) + (0 if parent is None else depths[parent]))
        for number, parent in reversed(list(enumerate(self._parents))):
            if parent is not None:
                subtree[parent] += subtree[number]
                heat[parent] += heat[number]
                used_s[parent] = max(used_s[parent], used_s[number])
        return [
            OutlineNode(
                first=chain[0],
                last=chain[-1],
                blocks=len(chain),
                subtree_blocks=subtree[number],
                depth_blocks=depths[number],
                children=len(self._children[number]),
                heat=float(heat[number]),
                used_s=float(used_s[number]),
                stored_s=max(forest[block].last_stored_s for block in chain),
            )
            for number, chain in enumerate(chains)
        ]

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, last: int) -> int | None:
        return self._by_last.get(last)

    def child_count(self, node: int | None) -> int:
        return len(self._children[node])

    def children(self, node: int | None, order_by: OutlineOrder, offset: int, limit: int) -> Sequence[OutlineNode]:
        rows, most = [self._nodes[child] for child in self._children[node]], _MOST[order_by]
        return nsmallest(offset + limit, rows, lambda each: (-most(each), each.first))[offset:]

    def path(self, node: int, limit: int) -> Sequence[OutlineNode]:
        found, at = list[OutlineNode](), node if limit else None
        while at is not None and len(found) < limit:
            found.append(self._nodes[at])
            at = self._parents[at]
        return found


def chain_from(forest: Forest, sequence_hash: int, limit: int) -> list[int]:
    """Return the blocks from this one on up to a fork, at most `limit`; none for an unknown one. Costs a walk."""
    after: dict[int, list[int]] = {}
    for block, node in forest.items():
        if node.parent is not None:
            after.setdefault(node.parent, []).append(block)
    found, at = list[int](), [sequence_hash] if sequence_hash in forest else []
    while len(at) == 1 and len(found) < limit:
        found.append(at[0])
        at = after.get(at[0], [])
    return found


class ReferenceIndex(ReferenceTree):
    """A `PrefixIndex`, whose methods are described there. `memory_bytes_max` is in bytes; 0: no limit."""

    def __init__(self, *, memory_bytes_max: int = 0) -> None:
        super().__init__(memory_bytes_max)

    # ------------------------------------------------------------------------------------------------- changes

    def register(self, rank: int, capacity_blocks: int = 0) -> None:
        del capacity_blocks
        if rank not in self._ranks:
            self._admit(rank)

    def store(self, rank: int, parent: int | None, sequence_hashes: Hashes, tier: Tier, now_s: float) -> int:
        self._check_known(rank)
        return self._store(rank, parent, _numbers(sequence_hashes), tier, now_s)

    def remove(self, rank: int, sequence_hashes: Hashes, tier: Tier) -> None:
        self._check_known(rank)
        self._remove(rank, _numbers(sequence_hashes), tier)

    def clear(self, rank: int, tier: Tier | None = None) -> None:
        self._check_known(rank)
        for on_tier in TIERS if tier is None else (tier,):
            self._clear(rank, on_tier)

    def drop(self, rank: int) -> None:
        if rank in self._ranks:
            self.clear(rank)
            del self._ranks[rank]

    def load(self, rank: int, chunks: Iterable[BlockColumns], now_s: float) -> int:
        self._check_known(rank)
        rows = [block for columns in chunks for block in columns.blocks()]
        self.clear(rank)
        return self._hold_rows(rank, rows, now_s)

    def repair(self, rank: int, buckets: bytes, chunks: Iterable[BlockColumns], now_s: float) -> int:
        self._check_known(rank)
        rows = [block for columns in chunks for block in columns.blocks()]
        for tier in TIERS:
            for sequence_hash in self._ranks[rank].on(tier):
                if is_in_buckets(sequence_hash, buckets):
                    self._release(rank, sequence_hash, tier)
        return self._hold_rows(rank, rows, now_s)

    def _hold_rows(self, rank: int, rows: Iterable[HeldBlock], now_s: float) -> int:
        attached = [self._attach(rank, row.parent, row.sequence_hash, row.tier_bits, now_s) for row in rows]
        self._refused += attached.count(False)
        return attached.count(False)

    def apply_batch(self, rank: int, message: bytes, now_s: float) -> int:
        self._check_known(rank)
        return sum([self._apply(rank, batch.event, now_s) for batch in decode_message(message)])

    def _apply(self, rank: int, event: Event, now_s: float) -> int:
        if isinstance(event, Stored):
            return self._store(rank, event.parent, event.sequence_hashes, event.tier, now_s)
        if isinstance(event, Removed):
            self._remove(rank, event.sequence_hashes, event.tier)
        else:
            self._clear(rank, event.tier)
        return 0

    def _check_known(self, rank: int) -> None:
        if rank not in self._ranks:
            raise KeyError(rank)

    # ------------------------------------------------------------------------------------------------- queries

    def _overlaps(self, hashes: Sequence[int]) -> dict[int, Depths]:
        """Return the depths of every rank that holds at least the first block on some tier."""
        depths: dict[int, list[int]] = {}
        alive = [-1] * len(TIERS)
        depth = 0
        for depth, sequence_hash in enumerate(hashes):
            node = self._nodes.get(sequence_hash)
            holders = 0
            for tier in TIERS:
                if node is not None:
                    holders |= node.holders[tier]
                if alive[tier] & ~holders:
                    if depth:
                        _settle(depths, alive[tier] & ~holders, tier, depth)
                    alive[tier] &= holders
            if not alive[-1]:
                break
        else:
            for tier in TIERS if hashes else ():
                _settle(depths, alive[tier], tier, depth + 1)
        return {rank: (found[0], found[1], found[2], found[3]) for rank, found in depths.items()}

    def match(self, sequence_hashes: Hashes, out: Buffer, ranks: bytes | None = None) -> int:
        rows = memoryview(out).cast("B").cast("i")
        found, columns = self._overlaps(_numbers(sequence_hashes)), len(rows) // len(TIERS)
        rows[:] = memoryview(bytes(rows.nbytes)).cast("i")
        asked = ((rank, rank) for rank in found if rank < columns) if ranks is None else enumerate(array("I", ranks))
        for column, rank in asked:
            for tier, depth in enumerate(found.get(rank, ())):
                rows[tier * columns + column] = depth
        return max((depths[-1] for depths in found.values()), default=0)

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        return self._ranks[rank].digests[tier].of_tier(tier)

    def bucket_digests(self, rank: int, tier: Tier) -> tuple[int, ...]:
        return self._ranks[rank].digests[tier].buckets

    def dump(self, rank: int, chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
        held = self._ranks[rank].held
        parents = {sequence_hash: self._nodes[sequence_hash].parent for sequence_hash in held}
        rows = (HeldBlock(each, parents[each], held[each]) for each in parents_first(parents))
        return block_columns(rows, chunk_blocks)

    def snapshot(self) -> bytes:
        return seal(write_body(saved(self._nodes, self._ranks)))

    def restore(self, data: Buffer) -> None:
        self._become(read_body(unseal(data)))

    def children(self, sequence_hash: int | None) -> list[int]:
        return children_of(self._nodes, sequence_hash)

    def holders(self, sequence_hash: int) -> dict[int, int]:
        node = self._nodes.get(sequence_hash)
        return {} if node is None else node.holder_bits()

    def outline(self, requests: Sequence[PassedRequest] = ()) -> ReferenceOutline:
        return ReferenceOutline(self._nodes, requests)

    def chain(self, sequence_hash: int, limit: int) -> bytes:
        found = chain_from(self._nodes, sequence_hash, limit)
        return pack_u64(found)

    def structure(self) -> dict[str, int]:
        return {"nodes": len(self._nodes), "holdings": self._holdings}

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(
            ranks=len(self._ranks),
            nodes=len(self._nodes),
            held_blocks=self._holdings,
            memory_bytes=sum(self.memory().values()),
            duplicate_blocks_total=self._duplicates,
            unknown_removals_total=self._unknown_removals,
            parent_conflicts_total=self._nodes.conflicts_total,
            refused_blocks_total=self._refused,
        )


def _numbers(hashes: Hashes) -> Sequence[int]:
    return unpack_u64(hashes) if isinstance(hashes, bytes) else hashes


def _settle(depths: dict[int, list[int]], ranks: int, tier: Tier, depth: int) -> None:
    for rank in ranks_of(ranks):
        depths.setdefault(rank, [0, 0, 0, 0])[tier] = depth
