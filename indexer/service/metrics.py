"""The index's metrics, read from its statistics at scrape time."""

from collections.abc import Iterator

from indexer.follow.fold import FoldStatistics, IndexFold
from indexer.service.feed import IndexFeed
from indexer.service.snapshots import SnapshotStatistics
from kv_protocol.events import TIERS
from kv_runtime.telemetry import Family, by_name, counter, gauge

_RANK = ("worker", "dp_rank")
_STREAM_COUNTS = (
    ("gaps", "Holes found in a rank's stream: batches are missing"),
    ("holes_closed", "Holes closed by batches that came later in the log"),
    ("replays", "Holes closed by a replay"),
    ("repairs", "Repairs: the differing buckets of a rank were replaced"),
    ("resyncs", "Resyncs: all blocks of a rank were replaced by a dump"),
    ("restarts", "New epochs of a rank's stream"),
    ("digest_mismatches", "Heartbeats with a digest that differs from the index's at the same place"),
    ("duplicates", "Batches ignored because they had been applied before, or a dump or repair covered them"),
    ("implausible", "Sequence numbers that cannot be right: over 2^20 ahead, or contradicted by heartbeats or answers"),
    ("heals", "Recoveries of a rank's stream that have ended, each by an answer, by the log or by a new epoch"),
    ("other_epoch", "Batches ignored because the index does not follow their epoch"),
    ("kept_lost", "Batches dropped because the buffer for batches during a recovery was full"),
)

_HEALING = "Total time of a rank's recoveries, each from the first sign of a difference to its end"


def index_families(fold: IndexFold, feed: IndexFeed) -> Iterator[Family]:
    """Yield all families of one index."""
    statistics = fold.statistics()
    streams = [((rank.worker_id, str(rank.dp_rank)), stream) for rank, stream in statistics.streams.items()]
    counts = [(at, stream.counts) for at, stream in streams]
    blocks = [
        ((rank.worker_id, str(rank.dp_rank), tier.name.lower()), counts_of_rank[tier])
        for rank, counts_of_rank in statistics.blocks.items()
        for tier in TIERS
    ]
    yield gauge("index_blocks", "Blocks that a rank holds, as far as the index knows", (*_RANK, "medium"), blocks)
    for name, meaning, figure in (
        ("events_applied", "Batches applied to the index", "applied"),
        *((f"stream_{figure}", meaning, figure) for figure, meaning in _STREAM_COUNTS),
        ("stream_healing_seconds", _HEALING, "healing_s_total"),
    ):
        yield counter(name, meaning, _RANK, [(at, getattr(each, figure)) for at, each in counts])
    healed = [(at, each.last_healing_s) for at, each in counts if each.heals]
    yield gauge("stream_last_healing_seconds", "How long the last recovery of a rank took", _RANK, healed)
    stale = [(at, bool(stream.stale)) for at, stream in streams]
    yield gauge("stream_stale", "1 while the blocks of a rank are not known to be current", _RANK, stale)
    fresh = [((rank.worker_id, str(rank.dp_rank)), seconds) for rank, seconds in feed.freshness_s.items()]
    meaning = "Age of a rank's newest message, from the engine's flush, once it was applied, kept for later or ignored"
    yield gauge("freshness_seconds", meaning, _RANK, fresh)
    unread = [((), bool(feed.catching_up()))]
    yield gauge("index_catching_up", "1 until the index has read the log that existed at its start", (), unread)
    yield from _size_families(statistics)
    yield from _count_families(statistics, feed)


def snapshot_families(statistics: SnapshotStatistics) -> Iterator[Family]:
    """Yield the families of an index's snapshots: counts, and the state at the last check."""
    for name, meaning, count in (
        ("snapshots_written", "Snapshots written and read back", statistics.written_total),
        (
            "snapshot_failures",
            "Checks, one every 5 s, that failed: to read the log's state, write or delete a snapshot, or purge the log",
            statistics.failures_total,
        ),
        ("snapshots_refused", "Snapshots that could not be used at a start", statistics.refused_total),
    ):
        yield counter(name, meaning, (), [((), count)])
    age = [] if statistics.newest_age_s is None else [((), statistics.newest_age_s)]
    yield gauge("snapshot_age_seconds", "Age of the newest snapshot that any index wrote", (), age)
    for name, meaning, value in (
        ("snapshot_bytes", "Size of the snapshot that this process wrote or read last", statistics.newest_bytes),
        ("snapshot_seq", "Log sequence number that the newest snapshot covers", statistics.newest_seq),
        ("log_purged_seq", "Log sequence number up to which this process last purged the log", statistics.purged_seq),
        ("log_bytes", "Bytes that the stream KV_EVENTS takes on disk", statistics.log_bytes),
    ):
        yield gauge(name, meaning, (), [((), value)])


def _size_families(statistics: FoldStatistics) -> Iterator[Family]:
    index = statistics.index
    overfull = "Ranks with blocks that the index refused because its memory limit was reached"
    refused = "Ranks that the index has no room for now; it remembers 256 at most"
    for name, meaning, figure in (
        ("index_ranks", "Ranks in the index", index.ranks),
        ("index_nodes", "Distinct prefixes in the index", index.nodes),
        ("index_overfull_ranks", overfull, statistics.overfull_ranks),
        ("index_refused_ranks", refused, statistics.refused_ranks),
    ):
        yield gauge(name, meaning, (), [((), figure)])
    meaning = "Memory in use, by part; `index.memory_bytes_max` limits the sum"
    yield gauge("index_memory_bytes", meaning, ("part",), by_name((), statistics.memory_bytes))
    things = by_name((), statistics.structure)
    yield gauge("index_structure", "Number of data structures and blocks in the index, by kind", ("thing",), things)


def _count_families(statistics: FoldStatistics, feed: IndexFeed) -> Iterator[Family]:
    index = statistics.index
    refused_messages = statistics.refused_messages_total + feed.refused_messages_total
    for name, meaning, count in (
        (
            "index_duplicate_blocks",
            "Blocks stored again by a rank that already held them",
            index.duplicate_blocks_total,
        ),
        ("index_unknown_removals", "Removals of blocks that the rank did not hold", index.unknown_removals_total),
        ("index_parent_conflicts", "Blocks stored with another parent than before", index.parent_conflicts_total),
        ("index_refused_blocks", "Blocks refused because the memory limit was reached", index.refused_blocks_total),
        ("index_refused_messages", "Messages that the feed or the index refused", refused_messages),
        (
            "index_refused_rank_facts",
            "Events and heartbeats of ranks that the index has no room for",
            statistics.refused_rank_facts_total,
        ),
    ):
        yield counter(name, meaning, (), [((), count)])
    by_reason = by_name((), feed.gate.refused_total)
    yield counter("index_fleet_refused", "Fleet events that the index refused", ("reason",), by_reason)
