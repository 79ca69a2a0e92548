"""Metrics of consolidators; the label `source` names the publisher."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.mirror import RankMirror
from worker_agent.events.outbox import Outbox
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


def consolidator_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    """Yield the metrics of a process's consolidators."""
    yield from _stream_families(consolidators)
    yield from _mirror_families(consolidators)
    yield from _recovery_families(consolidators)
    yield from _source_families(consolidators)


def _ranks(consolidators: Sequence[Consolidator]) -> Iterator[tuple[tuple[str, str], Outbox, RankMirror]]:
    for each in consolidators:
        for rank in each.core.dp_ranks:
            yield (each.worker_id, str(rank)), each.core.outbox(rank), each.core.mirror(rank)


def _stream_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    outboxes, labels = [(at, outbox) for at, outbox, _ in _ranks(consolidators)], ("worker", "dp_rank")
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
        yield gauge(name, meaning, labels, [(at, getattr(outbox, field)) for at, outbox in outboxes])
    dropped = [(at, outbox.dropped_batches_total) for at, outbox in outboxes]
    yield counter("outbox_dropped", "Batches dropped from a full outbox", labels, dropped)
    failures = [
        ((each.worker_id,), sum(stream.failures_total for stream in each.streams.values())) for each in consolidators
    ]
    yield counter("publish_failures", "Publications that the log did not confirm", ("worker",), failures)


def _mirror_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    mirrors, labels = [(at, mirror) for at, _, mirror in _ranks(consolidators)], ("worker", "dp_rank")
    held = [(at, sum(digest.block_count for digest in mirror.digests())) for at, mirror in mirrors]
    yield gauge("mirror_blocks", "Blocks that the rank holds", labels, held)
    sources = {
        each.worker_id: dict.fromkeys(origin.source for origin in each.core.publishers) for each in consolidators
    }
    changes = [
        ((*at, source, kind), getattr(mirror.counts[source], kind))
        for at, mirror in mirrors
        for source in sources[at[0]]
        for kind in _MIRROR_COUNTS
    ]
    meaning = "Blocks in a source's events, by what they changed in the mirror"
    yield counter("mirror_blocks_changed", meaning, (*labels, "source", "kind"), changes)


def _recovery_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    answers = [(each.worker_id, list(each.answers.values())) for each in consolidators]
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


def _source_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    counts, events = _source_counts(consolidators)
    meaning = "Events of a publisher, by what became of them before the mirror"
    yield counter("hop_a_events", meaning, ("worker", "source", "kind"), events.items())
    for name, meaning in _HOP_A_COUNTS.items():
        samples = [((worker, source), n) for (worker, source, kind), n in counts.items() if kind == name]
        yield counter(name, meaning, ("worker", "source"), samples)


def _source_counts(
    consolidators: Sequence[Consolidator],
) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str, str]]]:
    counts, events = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in consolidators:
        for origin, core in each.core.publishers.items():
            at = (each.worker_id, origin.source)
            counts[*at, "refused_batches"] += core.refused_batches_total
            counts[*at, "foreign_rank_batches"] += core.foreign_rank_batches_total
            for kind, count in msgspec.structs.asdict(core.decoder.counts).items():
                events[*at, kind] += count
        for reader in each.readers:
            cursor, at = reader.cursor, (each.worker_id, reader.origin.source)
            counts[*at, "zmq_gaps"] += cursor.gaps_total
            counts[*at, "zmq_replays"] += cursor.replays_total
            counts[*at, "zmq_lost"] += cursor.lost_total
            counts[*at, "zmq_restarts"] += cursor.restarts_total
            counts[*at, "refused_messages"] += reader.refused_messages_total + cursor.refused_total
    return counts, events
