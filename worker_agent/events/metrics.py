"""Metrics of consolidators; the label `source` names the source of a publisher."""

from collections import Counter
from collections.abc import Iterator, Sequence

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.batches import KINDS as HOP_A_KINDS
from worker_agent.events.recoveries import KINDS

_OF_OUTBOX = {
    "outbox_bytes": (gauge, "Bytes of batches that the log has not confirmed yet", "unacked_bytes"),
    "batch_ring_bytes": (gauge, "Memory of published batches, kept for replays", "ring_bytes"),
    "stream_seq": (gauge, "Last sequence number of the rank's stream", "last_seq"),
    "stream_published_seq": (
        gauge,
        "Sequence number up to which the log has every batch that was not dropped",
        "settled_seq",
    ),
    "outbox_dropped": (counter, "Batches dropped from a full outbox", "dropped_batches_total"),
}
"""For each metric of a rank: its kind, its meaning, and the field of `Outbox`."""
MIRROR_COUNTS = (
    *("stored", "removed", "deduplicated", "duplicate"),
    *("unknown_parent", "unknown_name", "unknown_removal", "unfit", "ambiguous"),
)
_ANSWERS = {
    "recoveries_answered": ("Complete answers to recovery questions of indexes", "answered_total"),
    "recovery_bytes": ("Bytes of answers to recovery questions", "bytes_total"),
}
_QUESTIONS = {
    "refused_recover_requests": (
        "Recovery questions refused: unreadable, without a reply subject, or 256 were waiting",
        "refused_total",
    ),
    "dropped_recover_requests": (
        "Recovery questions dropped: repeated, or replaced or overtaken by another of the same asker",
        "dropped_total",
    ),
}
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
    yield from _rank_families(consolidators)
    yield from _worker_families(consolidators)
    yield from _source_families(consolidators)


def _rank_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    labels = ("worker", "dp_rank")
    cores = [((each.worker_id, str(rank)), each.core, rank) for each in consolidators for rank in each.core.dp_ranks]
    for name, (family, meaning, field) in _OF_OUTBOX.items():
        yield family(name, meaning, labels, [(at, getattr(core.outboxes[rank], field)) for at, core, rank in cores])
    held = [(at, sum(tier.block_count for tier in core.mirrors[rank].digests())) for at, core, rank in cores]
    yield gauge("mirror_blocks", "Blocks that the rank holds", labels, held)
    changes = [
        ((*at, source, kind), core.mirrors[rank].counts[source][kind])
        for at, core, rank in cores
        for source in dict.fromkeys(origin.source for origin in core.publishers)
        for kind in MIRROR_COUNTS
    ]
    meaning = "Blocks in a source's events, by what they changed in the mirror"
    yield counter("mirror_blocks_changed", meaning, (*labels, "source", "kind"), changes)


def _worker_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    streams = [((each.worker_id,), each.streams.values()) for each in consolidators]
    failures = [(at, sum(rank.failures_total for rank in ranks)) for at, ranks in streams]
    yield counter("publish_failures", "Publications that the log did not confirm", ("worker",), failures)
    answers = [((each.worker_id,), list(each.answers.values())) for each in consolidators]
    for name, (meaning, field) in _ANSWERS.items():
        samples = [
            ((*at, kind), sum(getattr(rank, field)[kind] for rank in ranks)) for at, ranks in answers for kind in KINDS
        ]
        yield counter(name, meaning, ("worker", "kind"), samples)
    for name, (meaning, field) in _QUESTIONS.items():
        counts = [(at, sum(getattr(rank, field) for rank in ranks)) for at, ranks in answers]
        yield counter(name, meaning, ("worker",), counts)


def _source_families(consolidators: Sequence[Consolidator]) -> Iterator[Family]:
    counts, events = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in consolidators:
        for origin, publisher in each.core.publishers.items():
            at = (each.worker_id, origin.source)
            counts[*at, "refused_batches"] += publisher.refused_batches_total
            counts[*at, "foreign_rank_batches"] += publisher.foreign_rank_batches_total
            for kind in HOP_A_KINDS:
                events[*at, kind] += publisher.decoder.counts[kind]
        for reader in each.readers:
            cursor, at = reader.cursor, (each.worker_id, reader.origin.source)
            for kind in ("gaps", "replays", "lost", "restarts"):
                counts[*at, f"zmq_{kind}"] += getattr(cursor, f"{kind}_total")
            counts[*at, "refused_messages"] += reader.refused_messages_total + cursor.refused_total
    meaning = "Events of a publisher that were read, by kind; or refused or ignored, by reason"
    yield counter("hop_a_events", meaning, ("worker", "source", "kind"), events.items())
    for name, meaning in _HOP_A_COUNTS.items():
        samples = [((worker, source), n) for (worker, source, kind), n in counts.items() if kind == name]
        yield counter(name, meaning, ("worker", "source"), samples)
