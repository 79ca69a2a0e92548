"""The agent's figures as metrics, made from statistics when they are scraped."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.api import AgentApi
from worker_agent.consolidator import Consolidator
from worker_agent.consolidator_metrics import ConsolidatorMetrics
from worker_agent.core.dialects.trtllm_blocks import PublisherCounts
from worker_agent.load_reports import LoadReports

ENGINE_EVENT_KINDS = (
    *("created", "stored", "removed", "updated"),
    *("window_filtered", "held_back_dropped", "refused", "unreadable"),
)
PUBLISHER_COUNTS = {
    "event_id_gaps": "Jumps in the engine's event ids; each clears its rank",
    "window_changes": "The attention window that counts became another; each clears its rank",
    "windows_assumed": "Ranks whose attention window was guessed from events",
    "oversize_dropped": "Events with a block larger than block_size",
    "partial_blocks_dropped": "Partial blocks kept from the wire",
    "nameless_blocks_dropped": "Blocks whose engine hash is null",
    "under_withheld_dropped": "Blocks under one that was kept from the wire",
    "withheld_forgotten": "Blocks kept from the wire, and forgotten before their removal",
    "tier_moves": "Blocks that the engine moved between GPU and host",
    "priority_changes": "Blocks whose retention priority changed",
}


class AgentMetrics:
    """Reads every part of the agent; holds nothing."""

    def __init__(
        self, worker: str, counts: PublisherCounts, consolidator: Consolidator, loads: LoadReports, api: AgentApi
    ) -> None:
        self._worker = worker
        self._counts, self._consolidator, self._loads, self._api = counts, consolidator, loads, api

    def families(self) -> Iterator[Family]:
        """Yield all families."""
        yield from self._engine_families()
        yield from ConsolidatorMetrics([self._consolidator]).families()
        yield from self._load_families()
        outcomes = self._api.requests_total.items()
        samples = [((self._worker, outcome), float(count)) for outcome, count in outcomes]
        yield counter("agent_requests", "Requests by outcome", ("worker", "outcome"), samples)
        yield gauge(
            "agent_inflight_requests", "Requests being served", ("worker",), [((self._worker,), self._api.running)]
        )

    def _engine_families(self) -> Iterator[Family]:
        by_kind = [((self._worker, kind), float(getattr(self._counts, kind))) for kind in ENGINE_EVENT_KINDS]
        yield counter("engine_events", "Engine KV events by what became of them", ("worker", "kind"), by_kind)
        for name, meaning in PUBLISHER_COUNTS.items():
            yield counter(name, meaning, ("worker",), [((self._worker,), float(getattr(self._counts, name)))])

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
