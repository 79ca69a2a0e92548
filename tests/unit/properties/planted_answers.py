"""More prefix indexes with one bug each: in what is seldom asked, and in what is believed of contradictions."""

from collections.abc import Iterable, Iterator, Sequence

from typing_extensions import Buffer

from indexer.index.outline import PassedRequest
from indexer.index.prefix_index import PrefixOrder, RefusedEvent, Stretch
from indexer.index.reference import ReferenceIndex
from indexer.index.reference_nodes import Forest, Node
from indexer.index.reference_outline import ReferenceOutline
from indexer.index.reference_snapshot import saved
from indexer.index.snapshot import seal, write_body
from kv_protocol.codec import split_message, unpack_u64
from kv_protocol.digest import is_in_buckets
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns, block_columns
from tests.support.planting import inside
from tests.unit.properties.planted_indexes import PLANTED


class ForgetsWhatIsParked(ReferenceIndex):
    """A snapshot says nothing of parked blocks."""

    def snapshot(self) -> bytes:
        return seal(write_body(saved(self._nodes, self._ranks, self._parked)._replace(parked=())))


class RestoresTheBlameToo(ReferenceIndex):
    """What was lost before a restore is held against a rank after it."""

    def restore(self, data: Buffer, now_s: float) -> None:
        lost = set(inside(self._parked, "_losers"))
        super().restore(data, now_s)
        inside(self._parked, "_losers").update(lost)


class WaitsLongerAfterRestores(ReferenceIndex):
    """Parked blocks wait from a while after the restore."""

    def restore(self, data: Buffer, now_s: float) -> None:
        super().restore(data, now_s + 1)


class StopsAtTheFirstRefusal(ReferenceIndex):
    """An event that is refused ends its message."""

    def apply_batch(self, rank: int, message: Buffer, now_s: float) -> list[RefusedEvent]:
        frames = [bytes(message)[frame.offset :][: 52 + len(frame.hashes)] for frame in split_message(message)]
        for number, frame in enumerate(frames):
            if refusals := super().apply_batch(rank, b"\1\0" + frame, now_s):
                offset = 2 + sum(map(len, frames[:number]))
                return [each._replace(event=number, offset=offset + each.offset - 2) for each in refusals]
        return []


class ShiftsBuckets(ReferenceIndex):
    """The digests of buckets add up, and are those of other buckets."""

    def bucket_digests(self, rank: int, tier: Tier) -> tuple[int, ...]:
        buckets = super().bucket_digests(rank, tier)
        return buckets[1:] + buckets[:1]


class LeavesNumbersStanding(ReferenceIndex):
    """A rank that holds nothing keeps the depths that stood in the buffer."""

    def _match_into(self, hashes: Sequence[int], out: memoryview) -> int:
        before = out.tolist()
        depth = super()._match_into(hashes, out)
        for at, number in enumerate(before):
            out[at] = out[at] or number
        return depth


class ForgetsForks(ReferenceIndex):
    """A block has one child."""

    def children(self, sequence_hash: int | None) -> list[int]:
        return super().children(sequence_hash)[:1]


class HoldsOnOneTier(ReferenceIndex):
    """A holder is told with its fastest tier only."""

    def holders(self, sequence_hash: int) -> dict[int, int]:
        return {rank: bits & -bits for rank, bits in super().holders(sequence_hash).items()}


class HidesHoles(ReferenceIndex):
    """A stretch that no rank holds is not shown."""

    def prefixes(self, limit: int, order_by: PrefixOrder = "blocks") -> list[Stretch]:
        return [each for each in super().prefixes(limit, order_by) if each.holders]


class CutsNodesAtHolders(ReferenceIndex):
    """A node of an outline ends where its holders change, as a stretch does."""

    def outline(self, requests: Sequence[PassedRequest] = ()) -> ReferenceOutline:
        outline = super().outline(requests)
        rows = inside(outline, "_nodes")
        for at, row in enumerate(rows):
            blocks = unpack_u64(self.chain(row.first, row.blocks))
            held = next((n for n, block in enumerate(blocks) if self.holders(block) != self.holders(blocks[0])), 0)
            rows[at] = row._replace(blocks=held or row.blocks)
        return outline


class WarmsOnlyTheLeaf(ReferenceIndex):
    """A request warms the node that it ends in, and none above."""

    def outline(self, requests: Sequence[PassedRequest] = ()) -> ReferenceOutline:
        outline = super().outline(requests)
        rows = inside(outline, "_nodes")
        for at, row in enumerate(rows):
            blocks = unpack_u64(self.chain(row.first, row.blocks))
            rows[at] = row._replace(heat=sum(each.heat for each in requests if each.sequence_hash in blocks))
        return outline


class DumpsChildrenFirst(ReferenceIndex):
    """A dump comes from the leaves."""

    def dump(self, rank: int, chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
        rows = [block for columns in super().dump(rank) for block in columns.blocks()]
        return block_columns(reversed(rows), chunk_blocks)


class ExpiresLate(ReferenceIndex):
    """A parked block outlives its time by a moment."""

    def expire(self, now_s: float) -> set[int]:
        return super().expire(now_s - 0.01)


class ForgetsTheUnknownParent(ReferenceIndex):
    """A restored block whose parent is not known begins a sequence."""

    def restore(self, data: Buffer, now_s: float) -> None:
        super().restore(data, now_s)
        for node in self._nodes.values():
            node.parent_known = True


class RepairsOnTop(ReferenceIndex):
    """What is not spoken of any more in a repaired bucket stays."""

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:
        before = [block for block in self._ranks[rank].held.items() if is_in_buckets(block[0], bytes(buckets))]
        parents = {sequence_hash: self._nodes[sequence_hash].parent for sequence_hash, _ in before}
        super().repair(rank, buckets, chunks, now_s)
        for sequence_hash, bits in before:
            self._attach(rank, parents[sequence_hash], sequence_hash, bits, now_s)


class RepairsOneTier(ReferenceIndex):
    """Repairs the GPU and leaves what lies elsewhere."""

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:
        self.is_repairing = True
        super().repair(rank, buckets, chunks, now_s)
        self.is_repairing = False

    def _release(self, rank: int, sequence_hash: int, tier: Tier) -> bool:
        is_left = self.__dict__.get("is_repairing", False) and tier != Tier.GPU
        return False if is_left else super()._release(rank, sequence_hash, tier)


class RepairsAnotherBucket(ReferenceIndex):
    """Forgets the blocks of the buckets that were not named."""

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:
        super().repair(rank, buckets, chunks, now_s)
        held = self._ranks[rank].held
        others = [block for block in held if block >> 60 == 15 and not is_in_buckets(block, bytes(buckets))]
        for tier in TIERS:
            self._remove(rank, others, tier)


PLANTED_IN_THE_WHOLE: tuple[type[ReferenceIndex], ...] = (
    *PLANTED,
    RepairsOnTop,
    RepairsOneTier,
    RepairsAnotherBucket,
    ForgetsWhatIsParked,
    RestoresTheBlameToo,
    WaitsLongerAfterRestores,
    StopsAtTheFirstRefusal,
    ShiftsBuckets,
    LeavesNumbersStanding,
    ForgetsForks,
    HoldsOnOneTier,
    HidesHoles,
    CutsNodesAtHolders,
    WarmsOnlyTheLeaf,
    DumpsChildrenFirst,
    ExpiresLate,
    ForgetsTheUnknownParent,
)
"""Bugs that a scenario over the whole interface must find."""

# ------------------------------------------------------------------------------------------------- contradictions


class ClosingForest(Forest):
    """A forest with circles in it."""

    def _leads_to(self, at: int | None, sequence_hash: int) -> bool:
        return super()._leads_to(at, sequence_hash) and at is None


class ClosesCircles(ReferenceIndex):
    """A block without a known parent may be attached behind its own descendant."""

    def __init__(self, *, parked_blocks_max: int = 65_536, parked_ttl_s: float = 5.0) -> None:
        super().__init__(parked_blocks_max=parked_blocks_max, parked_ttl_s=parked_ttl_s)
        self._nodes = ClosingForest()


class FickleForest(Forest):
    """A forest in which the latest store decides a block's parent."""

    def link(self, sequence_hash: int, parent: int | None, now_s: float) -> Node:
        node = super().link(sequence_hash, parent, now_s)
        if node.parent != parent and parent in self and not self._leads_to(parent, sequence_hash):
            if node.parent is not None:
                self[node.parent].child_count -= 1
            node.parent = parent
            self._adopt(parent, now_s)
        return node


class BelievesTheLast(ReferenceIndex):
    """Another parent of a block is counted, and believed."""

    def __init__(self, *, parked_blocks_max: int = 65_536, parked_ttl_s: float = 5.0) -> None:
        super().__init__(parked_blocks_max=parked_blocks_max, parked_ttl_s=parked_ttl_s)
        self._nodes = FickleForest()


class CountsConflictsByTier(ReferenceIndex):
    """A row of a dump that lies on two tiers contradicts twice."""

    def _insert(self, rank: int, parent: int | None, sequence_hash: int, tier_bits: int, now_s: float) -> bool:
        for tier in TIERS:
            if tier_bits >> tier & 1:
                super()._insert(rank, parent, sequence_hash, 1 << tier, now_s)
        return True


class WakesTheLastFirst(ReferenceIndex):
    """Of those that wait for a block, and contradict each other, the wrong one is believed."""

    def _attach(self, rank: int, parent: int | None, sequence_hash: int, tier_bits: int, now_s: float) -> bool:
        self._insert(rank, parent, sequence_hash, tier_bits, now_s)
        came = [sequence_hash] if parent is None else [parent, sequence_hash]
        while came:
            at = came.pop(0)
            for block in reversed(self._parked.take(at)):
                self._insert(block.rank, at, block.sequence_hash, 1 << block.tier, now_s)
                came.append(block.sequence_hash)
        return True


class RefusesInOtherWords(ReferenceIndex):
    """A refusal names the batch, not the byte."""

    def apply_batch(self, rank: int, message: Buffer, now_s: float) -> list[RefusedEvent]:
        starts = [frame.offset for frame in split_message(message)]
        return [each._replace(offset=starts[each.event]) for each in super().apply_batch(rank, message, now_s)]


PLANTED_CONTRADICTIONS: tuple[type[ReferenceIndex], ...] = (
    ClosesCircles,
    BelievesTheLast,
    CountsConflictsByTier,
    WakesTheLastFirst,
    RefusesInOtherWords,
)
"""Bugs that show only where hashes contradict each other, or events cannot be."""
