"""Views of a fold: each rank's for a decision, and all figures for metrics and people."""

import msgspec

from indexer.follow.status import FollowerStatistics
from indexer.index.prefix_index import Depths, IndexStatistics
from kv_protocol.ids import WorkerRank


class RankView(msgspec.Struct, frozen=True, gc=False):
    """One rank for a decision: its overlap with the request, its place in its stream, and why it is stale."""

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
    """Ranks that are refused now, as far as they are named."""
    refused_rank_facts_total: int
    """Facts of ranks that were refused."""
    refused_messages_total: int
    """Messages of ranks' streams that were malformed, or that the index refused."""
