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
    "zmq_gaps": "Holes found on hop A",
    "zmq_replays": "Replays asked for on hop A",
    "zmq_lost": "Holes on hop A that no replay filled; each clears its source",
    "zmq_restarts": "Publishers that began anew; each clears its source",
    "refused_messages": "Hop A messages that could not be read",
    "refused_batches": "Hop A batches that could not be read",
    "foreign_rank_batches": "Hop A batches of a rank that their publisher does not speak for",
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
            ("outbox_bytes", "Bytes that the log did not take yet", "waiting_bytes"),
            ("batch_ring_bytes", "Memory of published batches that can be told again", "ring_bytes"),
            ("stream_seq", "Last seq given out", "last_seq"),
            ("stream_published_seq", "Seq up to which the log has all that was not dropped", "published_seq"),
        ):
            yield gauge(name, meaning, labels, [(at, float(getattr(s, field))) for at, s in ranks])
        dropped = [(at, float(s.dropped_batches_total)) for at, s in ranks]
        yield counter("outbox_dropped", "Batches dropped from a full outbox", labels, dropped)
        failures = [
            ((each.worker_id,), float(sum(stream.failures_total for stream in each.streams.values())))
            for each in self._consolidators
        ]
        yield counter("publish_failures", "Publications that the log did not confirm", ("worker",), failures)

    def _mirror_families(self) -> Iterator[Family]:
        ranks, labels = list(self._ranks()), ("worker", "dp_rank")
        yield gauge("mirror_blocks", "Blocks that the rank holds", labels, [(at, s.held_blocks) for at, s in ranks])
        changes = [
            ((*at, source, kind), float(getattr(counts, kind)))
            for at, s in ranks
            for source, counts in s.counts.items()
            for kind in _MIRROR_COUNTS
        ]
        meaning = "Blocks by what the mirror made of a source's events"
        yield counter("mirror_blocks_changed", meaning, (*labels, "source", "kind"), changes)

    def _recovery_families(self) -> Iterator[Family]:
        answers = [(each.worker_id, list(each.answers.values())) for each in self._consolidators]
        for name, meaning, field in (
            ("recoveries_answered", "Answers to readers that lacked something, whole ones", "answered_total"),
            ("recovery_bytes", "Bytes of such answers", "bytes_total"),
        ):
            samples = [
                ((worker, kind), float(sum(getattr(each, field)[kind] for each in of_worker)))
                for worker, of_worker in answers
                for kind in KINDS
            ]
            yield counter(name, meaning, ("worker", "kind"), samples)
        for name, meaning, field in (
            ("refused_recover_requests", "Questions of readers that were not taken", "refused_total"),
            ("dropped_recover_requests", "Questions that were repeated, or gave way to a later one", "dropped_total"),
        ):
            counts = [((worker,), float(sum(getattr(each, field) for each in all_))) for worker, all_ in answers]
            yield counter(name, meaning, ("worker",), counts)

    def _source_families(self) -> Iterator[Family]:
        counts, events = self._source_counts()
        meaning = "Hop A events by what became of them before the mirror"
        decoded = [(labels, float(count)) for labels, count in events.items()]
        yield counter("hop_a_events", meaning, ("worker", "source", "kind"), decoded)
        for name, meaning in _HOP_A_COUNTS.items():
            samples = [((worker, source), float(n)) for (worker, source, kind), n in counts.items() if kind == name]
            yield counter(name, meaning, ("worker", "source"), samples)

    def _source_counts(self) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str, str]]]:
        counts, events = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for each in self._consolidators:
            origins = each.core.statistics().origins
            for reader in each.readers:
                cursor, core, at = reader.cursor, origins[reader.origin], (each.worker_id, reader.origin.source)
                counts[*at, "zmq_gaps"] += cursor.gaps_total
                counts[*at, "zmq_replays"] += cursor.replays_total
                counts[*at, "zmq_lost"] += cursor.lost_total
                counts[*at, "zmq_restarts"] += cursor.restarts_total
                counts[*at, "refused_messages"] += reader.refused_messages_total + cursor.refused_total
                counts[*at, "refused_batches"] += core.refused_batches_total
                counts[*at, "foreign_rank_batches"] += core.foreign_rank_batches_total
                for kind, count in msgspec.structs.asdict(core.decoded).items():
                    events[*at, kind] += count
        return counts, events
