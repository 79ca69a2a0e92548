"""The agent's metrics, computed from statistics at each scrape."""

from collections.abc import Iterable, Iterator, Mapping

from kv_protocol.load import LoadReport
from kv_runtime.supervise import SupervisedWork
from kv_runtime.telemetry import Family, by_name, counter, gauge
from worker_agent.api.app import AgentApi
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.metrics import consolidator_families
from worker_agent.events.mirror import ENGINE
from worker_agent.load.reports import LoadReports, LoadRows

ENGINE_EVENT_KINDS = (
    *("created", "stored", "removed", "updated"),
    *("window_filtered", "refused", "unreadable"),
)
PUBLISHER_COUNTS = {
    "event_id_gaps": "Jumps in the engine's event ids; each clears the rank",
    "event_ids_back": "Jumps of the engine's event ids to a smaller id",
    "window_changes": "Changes of the widest attention window; each clears the rank",
    "windows_assumed": "Ranks with an attention window that was guessed, because the engine's `created` event was lost",
    "oversize_dropped": "Events dropped because of a block larger than `engine.block_size`",
    "partial_blocks_dropped": "Partial blocks that were not published",
    "nameless_blocks_dropped": "Blocks dropped because their engine hash is null",
    "under_withheld_dropped": "Blocks dropped because their parent was not published",
    "withheld_forgotten": "Unpublished blocks forgotten (65,536 are kept); their removals count as unknown_removal",
    "tier_moves": "Blocks that the engine moved between GPU and host",
    "priority_changes": "Blocks whose retention priority changed",
    "named_items": "Multimodal items that have their caller's name (UUID) instead of a digest; the name is hashed",
}
DRAFT_COUNTS = {
    "drafted_tokens": "Tokens that speculative decoding drafted, as TensorRT-LLM reports them",
    "accepted_tokens": "Drafted tokens that the model accepted",
    "drafting_requests": "Requests with drafts, once for each iteration",
}
PHASES = {
    "engine_phase_requests": (
        "Requests of the newest iteration, by phase, as far as the engine reports them",
        ("context", "generation", "queued_context", "queued_generation", "paused"),
        "requests",
    ),
    "engine_phase_tokens": (
        "Tokens that the newest iteration computed, or that wait to be computed, by phase",
        ("context", "queued_context"),
        "tokens",
    ),
    "engine_phase_kv_tokens": (
        "Tokens with KV in the cache, of the requests of the newest iteration, by phase",
        ("context", "generation", "queued_generation", "paused"),
        "kv_tokens",
    ),
}
"""Gauges by phase: the meaning, the phases, and what follows the phase in the names of `PhaseLoad`'s fields."""


def agent_families(
    worker: str, rules: TrtllmRules, path: Consolidator, loads: LoadReports, api: AgentApi
) -> Iterator[Family]:
    """Yield the families of events, load and requests of a served worker."""
    at = (worker,)
    yield from engine_event_families(worker, rules)
    yield from poll_families(worker, path)
    yield from consolidator_families([path])
    yield from load_families(worker, loads.newest)
    yield from row_families(worker, loads.rows)
    yield thread_family(worker, [*event_threads(path), loads.work])
    failures = [(at, loads.poll_failures_total)]
    yield counter("engine_stats_poll_failures", "Polls for iteration statistics that failed", ("worker",), failures)
    requests = by_name(at, api.in_flight.requests_total)
    yield counter("agent_requests", "Requests by outcome", ("worker", "outcome"), requests)
    meaning = "Tool calls in answers: complete, or unclosed at the end of the answer"
    yield counter("agent_tool_calls", meaning, ("worker", "ending"), by_name(at, api.completions.tool_calls_total))
    yield gauge("agent_inflight_requests", "Requests being served", ("worker",), [(at, api.in_flight.running)])


def event_threads(path: Consolidator) -> list[SupervisedWork]:
    """Return the polls of the engine; none if the engine is not polled."""
    return [] if path.poller is None else [path.poller.work]


def thread_family(worker: str, threads: Iterable[SupervisedWork]) -> Family:
    """Return how often polls failed unexpectedly."""
    failed = by_name((worker,), {each.name: each.failures_total for each in threads})
    meaning = "Unexpected failures of polls and of what applies them; polling starts again after a pause"
    return counter("poll_thread_failures", meaning, ("worker", "thread"), failed)


def engine_event_families(worker: str, rules: TrtllmRules) -> Iterator[Family]:
    """Yield the counts of polled KV events, by kind, reason and problem."""
    at, counts = (worker,), rules.counts
    kinds = by_name(at, {kind: counts[kind] for kind in ENGINE_EVENT_KINDS})
    yield counter("engine_events", "KV events of the engine, by kind", ("worker", "kind"), kinds)
    for name, meaning in PUBLISHER_COUNTS.items():
        yield counter(name, meaning, ("worker",), [(at, counts[name])])
    meaning = "KV events of the engine that were refused or unreadable, by reason"
    yield counter("quarantined_events", meaning, ("worker", "reason"), by_name(at, rules.quarantine.counts))
    meaning = "KV events lost between engine and agent, counted by the engine's ids"
    yield counter("engine_events_lost", meaning, ("worker", "dp_rank"), by_name(at, rules.events_lost))


def poll_families(worker: str, path: Consolidator) -> Iterator[Family]:
    """Yield the statistics of event polls."""
    pollers = [] if path.poller is None else [((worker, ENGINE), path.poller)]
    failed = [(at, each.poll_failures_total) for at, each in pollers]
    pressed = "Polls that did not wait for events: the engine's buffer was filling up, or had lost some"
    ratio = "Largest poll since the start, as a share of the source's buffer; 0 if the buffer's size is unknown"
    for family, name, meaning, rows in (
        (counter, "engine_polls", "Polls for KV events", [(at, each.pace.polls_total) for at, each in pollers]),
        (counter, "pressed_turns", pressed, [(at, each.pace.pressed_polls_total) for at, each in pollers]),
        (counter, "engine_poll_failures", "Polls for KV events that failed", failed),
        (gauge, "engine_event_buffer_ratio", ratio, [(at, each.pace.largest_ratio) for at, each in pollers]),
    ):
        yield family(name, meaning, ("worker", "source"), rows)


def load_families(worker: str, newest: Mapping[int, LoadReport]) -> Iterator[Family]:
    """Yield the newest load reports, by rank."""
    reports = [((worker, str(rank)), report) for rank, report in newest.items()]
    labels = ("worker", "dp_rank")
    for name, meaning in (
        ("running_requests", "Requests that the engine runs; 0 while it is idle"),
        (
            "waiting_requests",
            "Requests that wait in the engine; with attention DP TensorRT-LLM reports them on rank 0 only",
        ),
        ("used_blocks", "KV blocks in use; with attention DP TensorRT-LLM reports those of one rank for all"),
        ("total_blocks", "KV blocks of the rank's cache"),
    ):
        yield gauge(f"engine_{name}", meaning, labels, [(at, getattr(report, name)) for at, report in reports])
    seconds = [(at, report.iteration_s) for at, report in reports]
    yield gauge("engine_iteration_seconds", "Duration of the newest iteration", labels, seconds)
    for name, (meaning, phases, suffix) in PHASES.items():
        samples = [
            ((*at, phase), value)
            for at, report in reports
            for phase in phases
            if report.phases is not None and (value := getattr(report.phases, f"{phase}_{suffix}")) is not None
        ]
        yield gauge(name, meaning, (*labels, "phase"), samples)


def row_families(worker: str, rows: LoadRows) -> Iterator[Family]:
    """Yield the counts of speculative decoding in iteration statistics, and of skipped rows."""
    for name, meaning in DRAFT_COUNTS.items():
        yield counter(f"engine_{name}", meaning, ("worker",), [((worker,), rows.drafts[name])])
    meaning = "Rows of iteration statistics that were skipped, by what is wrong with them"
    yield counter("engine_stats_skipped", meaning, ("worker", "problem"), by_name((worker,), rows.skipped))
