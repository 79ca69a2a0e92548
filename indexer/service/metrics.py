"""The index's metrics, read from its statistics at scrape time."""

from collections.abc import Iterator

from indexer.follow.fold import FoldStatistics, IndexFold
from indexer.service.feed import IndexFeed
from indexer.service.snapshot_keeper import KeeperStatistics
from kv_protocol.events import TIERS
from kv_runtime.telemetry import Family, counter, gauge

_RANK = ("worker", "dp_rank")
_STREAM_COUNTS = (
    ("gaps", "Holes found in a rank's stream"),
    ("holes_closed", "Holes that the log closed by itself"),
    ("replays", "Holes that a replay closed"),
    ("repairs", "Answers that replaced the differing buckets of a rank"),
    ("resyncs", "Dumps that replaced a rank's blocks"),
    ("restarts", "New lives of a rank's stream"),
    ("digest_mismatches", "Heartbeats whose digest was not the index's"),
    ("duplicates", "Batches that had been applied before"),
    ("implausible", "Places told of that were too far from the stream's, and not believed"),
    ("heals", "Times that a rank was recovered"),
    ("other_epoch", "Batches of an epoch that does not live"),
    ("kept_lost", "Batches for which there was no room during a resync"),
)


def index_families(fold: IndexFold, feed: IndexFeed, implementation: str) -> Iterator[Family]:
    """Yield all families of one index; `implementation` is its name."""
    statistics = fold.statistics()
    streams = [((rank.worker_id, str(rank.dp_rank)), stream) for rank, stream in statistics.streams.items()]
    blocks = [
        ((rank.worker_id, str(rank.dp_rank), tier.name.lower()), float(counts[tier]))
        for rank, counts in statistics.blocks.items()
        for tier in TIERS
    ]
    yield gauge("index_blocks", "Blocks that the index knows a rank to hold", (*_RANK, "medium"), blocks)
    applied = [(at, float(stream.counts.applied)) for at, stream in streams]
    yield counter("events_applied", "Batches applied to the index", _RANK, applied)
    for name, meaning in _STREAM_COUNTS:
        samples = [(at, float(getattr(stream.counts, name))) for at, stream in streams]
        yield counter(f"stream_{name}", meaning, _RANK, samples)
    healing = [(at, stream.counts.healing_s_total) for at, stream in streams]
    yield counter("stream_healing_seconds", "From the first sign that something was wrong to its end", _RANK, healing)
    healed = [(at, stream.counts.last_healing_s) for at, stream in streams if stream.counts.heals]
    yield gauge("stream_last_healing_seconds", "How long the last recovery of a rank took", _RANK, healed)
    stale = [(at, float(bool(stream.stale))) for at, stream in streams]
    yield gauge("stream_stale", "1 while a rank's blocks are not known to be current", _RANK, stale)
    fresh = [((rank.worker_id, str(rank.dp_rank)), seconds) for rank, seconds in feed.freshness_s.items()]
    yield gauge("freshness_seconds", "From the engine's flush to being applied, newest batch", _RANK, fresh)
    unread = float(bool(feed.catching_up()))
    yield gauge("index_catching_up", "1 until the log is read that was there at the start", (), [((), unread)])
    yield gauge("index_info", "1: which index it is", ("implementation",), [((implementation,), 1.0)])
    yield from _size_families(statistics)
    yield from _count_families(statistics, feed)


def keeper_families(statistics: KeeperStatistics) -> Iterator[Family]:
    """Yield the families of a snapshot keeper: its counts, and the state at its last check."""
    for name, meaning, count in (
        ("snapshots_written", "Snapshots that were written, and read back", statistics.written_total),
        ("snapshot_failures", "Looks at which keeping snapshots or the log failed", statistics.failures_total),
        ("snapshots_refused", "Snapshots that a start could not use", statistics.refused_total),
    ):
        yield counter(name, meaning, (), [((), float(count))])
    age = [] if statistics.newest_age_s is None else [((), statistics.newest_age_s)]
    yield gauge("snapshot_age_seconds", "Age of the newest snapshot, whoever wrote it", (), age)
    for name, meaning, value in (
        ("snapshot_bytes", "Size of the snapshot that this process wrote or read last", statistics.newest_bytes),
        ("snapshot_seq", "Place in the log that the newest snapshot covers", statistics.newest_seq),
        ("log_purged_seq", "Place up to which this process purged the log last", statistics.purged_seq),
        ("log_bytes", "What the log takes on disk", statistics.log_bytes),
    ):
        yield gauge(name, meaning, (), [((), float(value))])


def _size_families(statistics: FoldStatistics) -> Iterator[Family]:
    index = statistics.index
    yield gauge("index_ranks", "Ranks in the index", (), [((), float(index.ranks))])
    yield gauge("index_nodes", "Distinct prefixes in the index", (), [((), float(index.nodes))])
    yield gauge("index_parked_blocks", "Blocks that wait for their parent", (), [((), float(index.parked_blocks))])
    for name, meaning, ranks in (
        ("index_overfull_ranks", "Ranks of which blocks were refused", statistics.overfull_ranks),
        ("index_refused_ranks", "Ranks for which there is no room, as far as named", statistics.refused_ranks),
    ):
        yield gauge(name, meaning, (), [((), float(ranks))])
    parts = [((part,), float(used)) for part, used in statistics.memory_bytes.items()]
    yield gauge("index_memory_bytes", "Memory in use; the sum of the parts is what the limit bounds", ("part",), parts)
    things = [((thing,), float(count)) for thing, count in statistics.structure.items()]
    yield gauge("index_structure", "How many of each thing the index is made of", ("thing",), things)


def _count_families(statistics: FoldStatistics, feed: IndexFeed) -> Iterator[Family]:
    index = statistics.index
    refused_messages = statistics.refused_messages_total + feed.refused_messages_total
    for name, meaning, count in (
        ("index_duplicate_blocks", "Stores of what was held already", index.duplicate_blocks_total),
        ("index_unknown_removals", "Removals of what was not held", index.unknown_removals_total),
        ("index_parked_lost_blocks", "Parked blocks given up; their rank was resynced", index.parked_lost_blocks_total),
        ("index_parent_conflicts", "Blocks that came with another parent than before", index.parent_conflicts_total),
        ("index_refused_blocks", "Blocks refused for want of memory", index.refused_blocks_total),
        ("index_refused_messages", "Messages that could not be read", refused_messages),
        ("index_refused_rank_facts", "Facts of ranks without room", statistics.refused_rank_facts_total),
    ):
        yield counter(name, meaning, (), [((), float(count))])
    by_reason = [((reason,), float(count)) for reason, count in feed.gate.refused_total.items()]
    yield counter("index_fleet_refused", "Fleet events that the index refused", ("reason",), by_reason)
