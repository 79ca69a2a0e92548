"""Bugs of the index and of what passes between it and a stream: loads, repairs, snapshots."""

from collections.abc import Iterable, Sequence

import msgspec
from typing_extensions import Buffer

from indexer.follow.checkpoint import RankCheckpoint
from indexer.follow.effects import Effect, RepairBuckets, ReplaceAll
from indexer.follow.question import OpenQuestion
from indexer.follow.rank_stream import FollowedRank
from indexer.index.reference import ReferenceIndex
from kv_protocol.digest import BUCKET_TABLE_BYTES, is_in_buckets
from kv_protocol.events import Tier
from kv_protocol.recovery import BlockColumns, RecoverRequest, block_columns
from tests.simulation.planted import Planted
from tests.support.planting import inside


class RepairsAll(FollowedRank):
    """Takes the blocks of some buckets for all that there are."""

    def perform(self, effects: list[Effect], now_s: float) -> None:
        super().perform(
            [ReplaceAll(each.chunks) if isinstance(each, RepairBuckets) else each for each in effects], now_s
        )


class RepairsAsOfOld(FollowedRank):
    """Says of itself what was true of an empty rank."""

    def _table(self) -> bytes:
        return bytes(BUCKET_TABLE_BYTES)


class AsksForTooLittle(FollowedRank):
    """Takes for missing what comes after the batch that is missing."""

    def _request(self, question: OpenQuestion) -> RecoverRequest:
        request = super()._request(question)
        return (
            msgspec.structs.replace(request, after_seq=request.after_seq + 1) if question.wants == "tail" else request
        )


class CheckpointsWhatWaits(FollowedRank):
    """Takes the batches behind a hole for applied, where a snapshot is taken before it is closed."""

    def checkpoint(self) -> RankCheckpoint:
        checkpoint = super().checkpoint()
        return msgspec.structs.replace(checkpoint, seq=checkpoint.seq + len(inside(self.follower, "_reorder_buffer")))


class IgnoresHostRemovals(ReferenceIndex):
    """Keeps blocks of one tier."""

    def _remove(self, rank: int, hashes: Sequence[int], tier: Tier) -> None:
        if tier is not Tier.HOST:
            super()._remove(rank, hashes, tier)


class LoadsOnTop(ReferenceIndex):
    """Adds a dump to what it holds."""

    def load(self, rank: int, chunks: Iterable[BlockColumns], now_s: float) -> None:
        for block in (block for columns in chunks for block in columns.blocks()):
            self._attach(rank, block.parent, block.sequence_hash, block.tier_bits, now_s)


class RepairsTheWrongBucket(ReferenceIndex):
    """Replaces what is in the bucket beside."""

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:
        named = int.from_bytes(buckets, "little") << 1
        shifted = (named & (1 << 256) - 1 | named >> 256).to_bytes(32, "little")
        inside = [block for columns in chunks for block in columns.blocks() if is_in_buckets(block[0], shifted)]
        super().repair(rank, shifted, block_columns(inside), now_s)


class RepairsOnTop(ReferenceIndex):
    """Adds a repair to what is in its buckets."""

    def repair(self, rank: int, buckets: Buffer, chunks: Iterable[BlockColumns], now_s: float) -> None:  # noqa: ARG002
        self._hold_rows(rank, [block for columns in chunks for block in columns.blocks()], now_s)


class RestoresAnEmptyIndex(ReferenceIndex):
    """Leaves out the blocks of a snapshot."""

    def restore(self, data: Buffer, now_s: float) -> None:
        super().restore(data, now_s)
        for rank in list(self._ranks):
            self.clear(rank)


STREAM = "indexer.follow.fold.FollowedRank"
TREE = "tests.simulation.index.ReferenceIndex"

PLANTED = (
    Planted(STREAM, RepairsAll, "faulty", 20),
    Planted(STREAM, RepairsAsOfOld, "faulty", 80),
    Planted(STREAM, AsksForTooLittle, "faulty", 40),
    Planted(STREAM, CheckpointsWhatWaits, "faulty", 80),
    Planted(TREE, IgnoresHostRemovals, "faulty", 20),
    Planted(TREE, LoadsOnTop, "faulty", 20),
    Planted(TREE, RepairsTheWrongBucket, "faulty", 20),
    Planted(TREE, RepairsOnTop, "faulty", 20),
    Planted(TREE, RestoresAnEmptyIndex, "calm", 20),
)
