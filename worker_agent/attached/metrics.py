"""Metrics of `worker-agent attach`, beside those of its streams."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, by_name, counter, gauge
from worker_agent.api.forwarder import Forwarder
from worker_agent.api.in_flight import RequestOutcome
from worker_agent.attached.client import EngineClient
from worker_agent.attached.health import HealthWatch
from worker_agent.attached.loads import EXPORT_PROBLEMS, EngineLoads
from worker_agent.events.consolidator import Consolidator
from worker_agent.metrics import (
    drain_families,
    engine_event_families,
    event_threads,
    load_families,
    row_families,
    thread_family,
)

_FORWARDED: tuple[RequestOutcome, ...] = ("ok", "refused", "failed", "cut", "cancelled")


def attach_families(
    worker: str,
    streams: Consolidator,
    client: EngineClient | None,
    watch: HealthWatch | None,
    loads: EngineLoads | None,
    forwarder: Forwarder | None,
) -> Iterator[Family]:
    """Yield the families of the parts that there are, but those of the streams' consolidator."""
    requests = {} if client is None else client.requests_total
    samples = [((worker, *question), count) for question, count in requests.items()]
    meaning = "Requests of the agent to the engine's HTTP endpoint, by outcome"
    yield counter("engine_questions", meaning, ("worker", "what", "outcome"), samples)
    if watch is not None:
        meaning = "1 while the worker is registered because the engine is healthy"
        yield gauge("engine_attached", meaning, ("worker",), [((worker,), watch.is_in)])
    if loads is not None:
        yield from load_families(worker, loads.newest)
        yield from row_families(worker, loads.rows)
        yield from exported_families(worker, loads)
    if forwarder is not None:
        outcomes = by_name((worker,), {each: forwarder.requests_total[each] for each in _FORWARDED})
        meaning = "Requests forwarded to the engine, by outcome"
        yield counter("forwarded_requests", meaning, ("worker", "outcome"), outcomes)
        running = [((worker,), forwarder.running)]
        yield gauge("forwarded_inflight_requests", "Requests being forwarded now", ("worker",), running)
    if streams.poller is not None:
        yield from engine_event_families(worker, streams.poller.source.rules)
        yield from drain_families(worker, streams)
        yield thread_family(worker, event_threads(streams))


def exported_families(worker: str, loads: EngineLoads) -> Iterator[Family]:
    """Yield the engine's own families under their own names, how old they are, and why they are not shown."""
    found = loads.own_families()
    if not isinstance(found, str):
        yield from found
    at, age_s = (worker,), loads.text_age_s
    meaning = "Age of the engine's own metrics as they were read last"
    yield gauge("engine_metrics_age_seconds", meaning, ("worker",), [] if age_s is None else [(at, age_s)])
    problems = {} if age_s is None else {reason: reason == found for reason in EXPORT_PROBLEMS}
    meaning = "1 while the engine's own metrics are not shown here, by reason"
    yield gauge("engine_metrics_not_shown", meaning, ("worker", "reason"), by_name(at, problems))
