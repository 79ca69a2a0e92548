"""The agent's metrics, computed from statistics at each scrape."""

from collections.abc import Iterator, Mapping

from kv_protocol.load import LoadReport
from kv_runtime.supervise import SupervisedThread
from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.api.app import AgentApi
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.event_path import EventPath
from worker_agent.events.metrics import ConsolidatorMetrics
from worker_agent.load.publisher import LoadReports
from worker_agent.load.reports import LoadRows

ENGINE_EVENT_KINDS = (
    *("created", "stored", "removed", "updated"),
    *("window_filtered", "held_back_dropped", "refused", "unreadable"),
)
PUBLISHER_COUNTS = {
    "event_id_gaps": "Jumps in the engine's event ids; each clears its rank",
    "event_ids_back": "Those of the jumps that went back",
    "window_changes": "The attention window that counts became another; each clears its rank",
    "windows_assumed": "Ranks whose attention window was guessed from events",
    "oversize_dropped": "Events with a block larger than block_size",
    "partial_blocks_dropped": "Partial blocks kept from the wire",
    "nameless_blocks_dropped": "Blocks whose engine hash is null",
    "under_withheld_dropped": "Blocks under one that was kept from the wire",
    "withheld_forgotten": "Blocks kept from the wire, and forgotten before their removal",
    "tier_moves": "Blocks that the engine moved between GPU and host",
    "priority_changes": "Blocks whose retention priority changed",
    "named_items": "Multimodal items of blocks that have a name of their caller's (UUID) instead of a digest",
}
PHASES = {
    "engine_phase_requests": (
        "Requests of the newest iteration, by phase",
        ("context", "generation", "queued_context", "queued_generation", "paused"),
        "requests",
    ),
    "engine_phase_tokens": (
        "Tokens that the newest iteration computed, and that wait to be, by phase",
        ("context", "queued_context"),
        "tokens",
    ),
    "engine_phase_kv_tokens": (
        "Tokens whose KV the requests of the newest iteration have, by phase",
        ("context", "generation", "queued_generation", "paused"),
        "kv_tokens",
    ),
}
"""Gauges by phase: meaning, phases, and the end of the fields' names in `PhaseLoad`."""


class AgentMetrics:
    """Reads every part of the agent; holds no state."""

    def __init__(self, worker: str, rules: TrtllmRules, path: EventPath, loads: LoadReports, api: AgentApi) -> None:
        self._worker = worker
        self._rules, self._path, self._loads, self._api = rules, path, loads, api

    def families(self) -> Iterator[Family]:
        """Yield all families."""
        yield from engine_event_families(self._worker, self._rules)
        yield from drain_families(self._worker, self._path)
        yield from ConsolidatorMetrics([self._path.consolidator]).families()
        yield from load_families(self._worker, self._loads.newest)
        yield from skipped_families(self._worker, self._loads.rows)
        threads = {**event_threads(self._path), "iteration-stats": self._loads.thread}
        yield thread_family(self._worker, threads)
        failures = [((self._worker,), float(self._loads.poll_failures_total))]
        yield counter("engine_stats_poll_failures", "Polls for iteration statistics that failed", ("worker",), failures)
        outcomes = self._api.requests_total.items()
        samples = [((self._worker, outcome), float(count)) for outcome, count in outcomes]
        yield counter("agent_requests", "Requests by outcome", ("worker", "outcome"), samples)
        calls = [((self._worker, ending), float(count)) for ending, count in self._api.tool_calls_total.items()]
        meaning = "Tool calls in answers, by whether the answer closed them"
        yield counter("agent_tool_calls", meaning, ("worker", "ending"), calls)
        yield gauge(
            "agent_inflight_requests", "Requests being served", ("worker",), [((self._worker,), self._api.running)]
        )


def event_threads(path: EventPath) -> dict[str, SupervisedThread]:
    """Return the threads that poll the sources, by name."""
    return {f"{name}-events": each.thread for name, each in path.publishers.items()}


def thread_family(worker: str, threads: Mapping[str, SupervisedThread]) -> Family:
    """Return how often threads failed."""
    failed = [((worker, name), float(each.failures_total)) for name, each in threads.items()]
    meaning = "Failures of polling threads that nobody expected; each begins again after a pause"
    return counter("poll_thread_failures", meaning, ("worker", "thread"), failed)


def engine_event_families(worker: str, rules: TrtllmRules) -> Iterator[Family]:
    """Yield the counts of polled KV events before they are published."""
    counts = rules.counts
    by_kind = [((worker, kind), float(getattr(counts, kind))) for kind in ENGINE_EVENT_KINDS]
    yield counter("engine_events", "Engine KV events by what became of them", ("worker", "kind"), by_kind)
    for name, meaning in PUBLISHER_COUNTS.items():
        yield counter(name, meaning, ("worker",), [((worker,), float(getattr(counts, name)))])
    kept_out = [((worker, reason), float(count)) for reason, count in rules.quarantine.counts.items()]
    meaning = "Engine KV events that could not be taken, by reason"
    yield counter("quarantined_events", meaning, ("worker", "reason"), kept_out)
    lost = [((worker, str(rank)), float(count)) for rank, count in dict(rules.events_lost).items()]
    meaning = "Events that the engine made and nobody got, by its ids"
    yield counter("engine_events_lost", meaning, ("worker", "dp_rank"), lost)


def drain_families(worker: str, path: EventPath) -> Iterator[Family]:
    """Yield the statistics of event polls."""
    labels = ("worker", "source")
    publishers = [((worker, name), each) for name, each in path.publishers.items()]
    drains = [(at, each.drain.statistics()) for at, each in publishers]
    for name, meaning, field in (
        ("engine_polls", "Polls for events", "polls_total"),
        (
            "pressed_turns",
            "Turns of the publisher that took all there was before anything was encoded",
            "pressed_cycles_total",
        ),
    ):
        yield counter(name, meaning, labels, [(at, float(getattr(drain, field))) for at, drain in drains])
    failures = [(at, float(each.poll_failures_total)) for at, each in publishers]
    yield counter("engine_poll_failures", "Polls that failed", labels, failures)
    meaning = "Largest poll since the start, of what the source's buffer holds; 0: not known"
    yield gauge("engine_event_buffer_ratio", meaning, labels, [(at, drain.largest_ratio) for at, drain in drains])


def load_families(worker: str, newest: Mapping[int, LoadReport]) -> Iterator[Family]:
    """Yield the newest load reports, by rank."""
    reports = [((worker, str(rank)), report) for rank, report in newest.items()]
    labels = ("worker", "dp_rank")
    for name, meaning in (
        ("running_requests", "Requests that the engine runs"),
        ("waiting_requests", "Requests that wait in the engine"),
        ("used_blocks", "KV blocks in use"),
        ("total_blocks", "KV blocks there are"),
    ):
        yield gauge(f"engine_{name}", meaning, labels, [(at, float(getattr(r, name))) for at, r in reports])
    seconds = [(at, report.iteration_s) for at, report in reports]
    yield gauge("engine_iteration_seconds", "How long the newest iteration took", labels, seconds)
    for name, (meaning, phases, figure) in PHASES.items():
        samples = [
            ((*at, phase), float(value))
            for at, report in reports
            for phase in phases
            if report.phases is not None and (value := getattr(report.phases, f"{phase}_{figure}")) is not None
        ]
        yield gauge(name, meaning, (*labels, "phase"), samples)


def skipped_families(worker: str, rows: LoadRows) -> Iterator[Family]:
    """Yield the skipped rows of iteration statistics."""
    skipped = [((worker, problem), float(count)) for problem, count in rows.skipped.items()]
    meaning = "Rows of iteration statistics that could not be reported, by what they do not say"
    yield counter("engine_stats_skipped", meaning, ("worker", "problem"), skipped)
