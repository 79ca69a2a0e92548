"""The agent's figures as metrics, made from statistics when they are scraped."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.api import AgentApi
from worker_agent.consolidator import Consolidator
from worker_agent.load_reports import LoadReports
from worker_agent.publisher import EventPublisher

_ENGINE_EVENT_KINDS = ("created", "stored", "removed", "updated", "unreadable")
_MIRROR_COUNTS = (
    *("stored", "removed", "deduplicated", "duplicate"),
    *("unknown_parent", "unknown_name", "unknown_removal", "unfit", "ambiguous"),
)


class AgentMetrics:
    """Reads every part of the agent; holds nothing."""

    def __init__(
        self, worker: str, publisher: EventPublisher, consolidator: Consolidator, loads: LoadReports, api: AgentApi
    ) -> None:
        self._worker = worker
        self._publisher, self._consolidator, self._loads, self._api = publisher, consolidator, loads, api

    def families(self) -> Iterator[Family]:
        """Yield all families."""
        yield from self._engine_families()
        yield from self._stream_families()
        yield from self._load_families()
        outcomes = self._api.requests_total.items()
        samples = [((self._worker, outcome), float(count)) for outcome, count in outcomes]
        yield counter("agent_requests", "Requests by outcome", ("worker", "outcome"), samples)
        yield gauge(
            "agent_inflight_requests", "Requests being served", ("worker",), [((self._worker,), self._api.running)]
        )

    def _engine_families(self) -> Iterator[Family]:
        counts = self._publisher.rules.counts
        by_kind = [((self._worker, kind), float(getattr(counts, kind))) for kind in _ENGINE_EVENT_KINDS]
        yield counter("engine_events", "Engine KV events by kind", ("worker", "kind"), by_kind)
        for name, meaning in (
            ("partial_blocks_dropped", "Partial blocks kept from the wire"),
            ("under_partial_dropped", "Events under a partial block"),
            ("oversize_dropped", "Events with a block larger than block_size"),
            ("window_filtered", "Events of narrower attention windows"),
            ("event_id_gaps", "Jumps in the engine's event ids; each clears its rank"),
        ):
            yield counter(name, meaning, ("worker",), [((self._worker,), float(getattr(counts, name)))])

    def _stream_families(self) -> Iterator[Family]:
        core, cursor = self._consolidator.core.statistics(), self._consolidator.cursor
        ranks = [((self._worker, str(rank)), statistics) for rank, statistics in core.ranks.items()]
        labels = ("worker", "dp_rank")
        yield gauge("mirror_blocks", "Blocks that the engine holds", labels, [(at, s.held_blocks) for at, s in ranks])
        yield gauge(
            "outbox_bytes", "Bytes that the log did not take yet", labels, [(a, s.waiting_bytes) for a, s in ranks]
        )
        yield gauge("stream_seq", "Last seq given out", labels, [(at, s.last_seq) for at, s in ranks])
        dropped = [(at, float(s.dropped_batches_total)) for at, s in ranks]
        yield counter("outbox_dropped", "Batches dropped from a full outbox", labels, dropped)
        changes = [
            ((*at, source, kind), float(getattr(counts, kind)))
            for at, s in ranks
            for source, counts in s.counts.items()
            for kind in _MIRROR_COUNTS
        ]
        meaning = "Blocks by what the mirror made of a source's events"
        yield counter("mirror_blocks_changed", meaning, (*labels, "source", "kind"), changes)
        for name, meaning, count in (
            ("zmq_gaps", "Holes found on hop A", cursor.gaps_total),
            ("zmq_replays", "Replays asked for on hop A", cursor.replays_total),
            ("zmq_lost", "Holes on hop A that no replay filled; each begins new epochs", cursor.lost_total),
            ("refused_messages", "Messages that could not be read", self._consolidator.refused_messages_total),
            ("refused_batches", "Hop A batches that could not be read", core.refused_batches_total),
            ("refused_events", "Hop A events that could not be read", core.refused_events_total),
            (
                "publish_failures",
                "Publications that the log did not confirm",
                self._consolidator.publish_failures_total,
            ),
            ("dumps", "Dumps given to readers", self._consolidator.dumps_total),
        ):
            yield counter(name, meaning, ("worker",), [((self._worker,), float(count))])

    def _load_families(self) -> Iterator[Family]:
        reports = [((self._worker, str(rank)), report) for rank, report in self._loads.newest.items()]
        labels = ("worker", "dp_rank")
        for name, meaning in (
            ("running_requests", "Requests that the engine runs"),
            ("waiting_requests", "Requests that wait in the engine"),
            ("used_blocks", "KV blocks in use"),
            ("total_blocks", "KV blocks there are"),
        ):
            yield gauge(f"engine_{name}", meaning, labels, [(at, float(getattr(r, name))) for at, r in reports])
