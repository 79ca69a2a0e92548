"""Views of a fold: each rank's for a decision, and all figures for metrics and people."""

import msgspec

from indexer.follow.status import FollowerStatistics
from indexer.index.prefix_index import Depths, IndexStatistics
from kv_protocol.ids import WorkerRank


class RankView(msgspec.Struct, frozen=True, gc=False):
    """What a decision reads of one rank: its overlap with the request, its place in the log, and what is wrong."""

    overlap_blocks: Depths
    epoch: int
    seq: int
    stale: str


class FoldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The index, each rank's stream, and how many blocks each rank holds on each tier."""

    index: IndexStatistics
    memory_bytes: dict[str, int]
    structure: dict[str, int]
    streams: dict[WorkerRank, FollowerStatistics]
    blocks: dict[WorkerRank, tuple[int, ...]]
    overfull_ranks: int
    refused_ranks: int
    """Named ones that have no place in the index now."""
    refused_rank_facts_total: int
    """Facts of ranks that had none."""
    refused_messages_total: int
    """Messages of a rank's stream that could not be read, or that the index could not."""
