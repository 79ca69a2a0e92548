"""Metrics of `worker-agent attach`, beside those of its streams."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, by_name, counter, gauge
from worker_agent.api.forwarder import Forwarder
from worker_agent.api.in_flight import RequestOutcome
from worker_agent.attached.client import EngineClient
from worker_agent.attached.health import HealthWatch
from worker_agent.attached.load_topic import LoadTopic
from worker_agent.attached.loads import EXPORT_PROBLEMS, EngineLoads
from worker_agent.attached.streams import EventStreams
from worker_agent.metrics import (
    drain_families,
    engine_event_families,
    event_threads,
    load_families,
    row_families,
    thread_family,
)

_FORWARDED: tuple[RequestOutcome, ...] = ("ok", "refused", "failed", "cut", "cancelled")


class AttachMetrics:
    """Reads the parts that exist; holds no state."""

    def __init__(
        self,
        worker: str,
        streams: EventStreams,
        client: EngineClient | None,
        watch: HealthWatch | None,
        loads: EngineLoads | None,
        forwarder: Forwarder | None,
        topic: LoadTopic | None = None,
    ) -> None:
        self._worker, self._streams, self._client, self._topic = worker, streams, client, topic
        self._watch, self._loads, self._forwarder = watch, loads, forwarder

    def families(self) -> Iterator[Family]:
        """Yield all families but those of the streams' consolidator."""
        yield from self._request_families()
        if self._watch is not None:
            meaning = "1 while the worker is registered because the engine is healthy"
            yield gauge("engine_attached", meaning, ("worker",), [((self._worker,), self._watch.is_in)])
        if (source := self._topic or self._loads) is not None:
            yield from load_families(self._worker, source.newest)
        if self._loads is not None:
            yield from row_families(self._worker, self._loads.rows)
            yield from exported_families(self._worker, self._loads)
        if self._forwarder is not None:
            yield from self._forwarder_families(self._forwarder)
        if self._streams.rules is not None:
            yield from engine_event_families(self._worker, self._streams.rules)
            yield from drain_families(self._worker, self._streams.path)
            yield thread_family(self._worker, event_threads(self._streams.path))

    def _request_families(self) -> Iterator[Family]:
        requests = {} if self._client is None else self._client.requests_total
        samples = [((self._worker, *question), count) for question, count in requests.items()]
        meaning = "Requests of the agent to the engine's HTTP endpoint, by outcome"
        yield counter("engine_questions", meaning, ("worker", "what", "outcome"), samples)

    def _forwarder_families(self, forwarder: Forwarder) -> Iterator[Family]:
        at, meaning = (self._worker,), "Requests forwarded to the engine, by outcome"
        outcomes = by_name(at, {each: forwarder.requests_total[each] for each in _FORWARDED})
        yield counter("forwarded_requests", meaning, ("worker", "outcome"), outcomes)
        meaning = "Requests being forwarded now"
        yield gauge("forwarded_inflight_requests", meaning, ("worker",), [(at, forwarder.running)])


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
