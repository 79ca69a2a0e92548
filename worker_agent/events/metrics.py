"""Metrics of consolidators; the label `source` names the publisher."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.events.consolidation import RankStatistics
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.recoveries import KINDS

_MIRROR_COUNTS = (
    *("stored", "removed", "deduplicated", "duplicate"),
    *("unknown_parent", "unknown_name", "unknown_removal", "unfit", "ambiguous"),
)
_HOP_A_COUNTS = {
    "zmq_gaps": "Gaps in a publisher's engine events",
    "zmq_replays": "Replays requested from a publisher, idle probes included",
    "zmq_lost": "Gaps that no replay filled; each clears the source",
    "zmq_restarts": "Restarts of a publisher, or lost connections without a replay endpoint; each clears the source",
    "refused_messages": "Messages of a publisher that could not be read",
    "refused_batches": "Batches of a publisher that could not be read",
    "foreign_rank_batches": "Batches of a rank that is not the publisher's, or not the worker's",
}


class ConsolidatorMetrics:
    """Reads the consolidators of a process; holds no state."""

    def __init__(self, consolidators: Sequence[Consolidator]) -> None:
        self._consolidators = tuple(consolidators)

    def families(self) -> Iterator[Family]:
        """Yield all families."""
        yield from self._stream_families()
        yield from self._mirror_families()
        yield from self._recovery_families()
        yield from self._source_families()

    def _ranks(self) -> Iterator[tuple[tuple[str, str], RankStatistics]]:
        for each in self._consolidators:
            for rank, statistics in each.core.statistics().ranks.items():
                yield (each.worker_id, str(rank)), statistics

    def _stream_families(self) -> Iterator[Family]:
        ranks, labels = list(self._ranks()), ("worker", "dp_rank")
        for name, meaning, field in (
            ("outbox_bytes", "Bytes of batches that the log has not confirmed yet", "waiting_bytes"),
            ("batch_ring_bytes", "Memory of published batches, kept for replays", "ring_bytes"),
            ("stream_seq", "Last sequence number of the rank's stream", "last_seq"),
            (
                "stream_published_seq",
                "Sequence number up to which the log has every batch that was not dropped",
                "published_seq",
            ),
        ):
            yield gauge(name, meaning, labels, [(at, getattr(s, field)) for at, s in ranks])
        dropped = [(at, s.dropped_batches_total) for at, s in ranks]
        yield counter("outbox_dropped", "Batches dropped from a full outbox", labels, dropped)
        failures = [
            ((each.worker_id,), sum(stream.failures_total for stream in each.streams.values()))
            for each in self._consolidators
        ]
        yield counter("publish_failures", "Publications that the log did not confirm", ("worker",), failures)

    def _mirror_families(self) -> Iterator[Family]:
        ranks, labels = list(self._ranks()), ("worker", "dp_rank")
        yield gauge("mirror_blocks", "Blocks that the rank holds", labels, [(at, s.held_blocks) for at, s in ranks])
        changes = [
            ((*at, source, kind), getattr(counts, kind))
            for at, s in ranks
            for source, counts in s.counts.items()
            for kind in _MIRROR_COUNTS
        ]
        meaning = "Blocks in a source's events, by what they changed in the mirror"
        yield counter("mirror_blocks_changed", meaning, (*labels, "source", "kind"), changes)

    def _recovery_families(self) -> Iterator[Family]:
        answers = [(each.worker_id, list(each.answers.values())) for each in self._consolidators]
        for name, meaning, field in (
            ("recoveries_answered", "Complete answers to recovery questions of indexes", "answered_total"),
            ("recovery_bytes", "Bytes of answers to recovery questions", "bytes_total"),
        ):
            samples = [
                ((worker, kind), sum(getattr(each, field)[kind] for each in of_worker))
                for worker, of_worker in answers
                for kind in KINDS
            ]
            yield counter(name, meaning, ("worker", "kind"), samples)
        dropped = "Recovery questions dropped: repeated, or replaced by a later one of the same index"
        for name, meaning, field in (
            (
                "refused_recover_requests",
                "Recovery questions refused: unreadable, or 256 were waiting",
                "refused_total",
            ),
            ("dropped_recover_requests", dropped, "dropped_total"),
        ):
            counts = [((worker,), sum(getattr(each, field) for each in all_)) for worker, all_ in answers]
            yield counter(name, meaning, ("worker",), counts)

    def _source_families(self) -> Iterator[Family]:
        counts, events = self._source_counts()
        meaning = "Events of a publisher, by what became of them before the mirror"
        yield counter("hop_a_events", meaning, ("worker", "source", "kind"), events.items())
        for name, meaning in _HOP_A_COUNTS.items():
            samples = [((worker, source), n) for (worker, source, kind), n in counts.items() if kind == name]
            yield counter(name, meaning, ("worker", "source"), samples)

    def _source_counts(self) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str, str]]]:
        counts, events = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for each in self._consolidators:
            for origin, core in each.core.statistics().origins.items():
                at = (each.worker_id, origin.source)
                counts[*at, "refused_batches"] += core.refused_batches_total
                counts[*at, "foreign_rank_batches"] += core.foreign_rank_batches_total
                for kind, count in msgspec.structs.asdict(core.decoded).items():
                    events[*at, kind] += count
            for reader in each.readers:
                cursor, at = reader.cursor, (each.worker_id, reader.origin.source)
                counts[*at, "zmq_gaps"] += cursor.gaps_total
                counts[*at, "zmq_replays"] += cursor.replays_total
                counts[*at, "zmq_lost"] += cursor.lost_total
                counts[*at, "zmq_restarts"] += cursor.restarts_total
                counts[*at, "refused_messages"] += reader.refused_messages_total + cursor.refused_total
        return counts, events
