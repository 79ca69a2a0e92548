"""Metrics of requests, from their head to their last byte.

begin -> parsed -> tokenized, hashed -> [queue_waited] -> chosen -> first_token -> end
rejected, retried, worker_failed, fallback: wherever it happens. `Lease.end` counts the answer, and what it reused:
error = predicted - actual: above 0 the index promised too much (evicted meanwhile), below 0 too little (in flight)
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Exemplar

from kv_runtime.telemetry import Family, Projection, by_name, counter, gauge, histogram
from router.decision.plan import STREAM_LOSSES, StreamLoss
from router.decision.policies import MODES
from router.decision.routing import Routing
from router.http.accounts import LIMITS
from router.metrics.decision import DecisionMetrics
from router.native import built
from router.queue.waiting import REFUSAL_REASONS

OUTCOMES = ("ok", "refused", "failed", "cancelled")
REJECTIONS = ("inflight_requests_max", "unmet_target", *LIMITS, *REFUSAL_REASONS)
"""Too many requests in flight; no rank is predicted to meet the targets; an account's limits; refused by the queue."""
PHASES = ("connect", "first_byte", "body")
_DURATION, _TTFT = "request_duration_seconds", "time_to_first_token_seconds"
_HISTOGRAMS = (
    (_DURATION, "Time from a request's head to the last byte of its answer", "mode", "duration"),
    (_TTFT, "Time from the routing of a request to its first token, where known", "mode", "ttft"),
    ("inter_token_latency_seconds", "Mean time between the tokens of an answer, where known", "mode", "itl"),
    (f"model_{_TTFT}", "Time from a request's routing to its first token, where known, by requested model",
     "model", "ttft"),
    (f"worker_{_TTFT}",
     "Time from the routing of a request to its first token, where known, by the worker that sent the token",
     "worker", "ttft"),
    ("prediction_error_tokens", "Predicted minus actual reused tokens of a request", "worker", "error_tokens"),
)  # fmt: skip
"""Name, meaning, label, and the field of the sums by that label."""


class RequestMetrics(built.RequestSums):
    """Counters and distributions of requests; each call costs a fraction of a microsecond.

    inflight      requests that are being served
    end           a request ended; an unknown model is counted as `unknown`
    queue_waited  a request left the queue, for any reason, after this time
    first_token   the first token of an answer came from this worker this long after the request was routed
    worker_failed a worker failed a request
    """

    def __init__(self, registry: CollectorRegistry, routing: Routing, modes: tuple[str, ...] = tuple(MODES)) -> None:
        super().__init__(routing.state.fleet, modes)
        self._modes = modes
        self._rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self._retries = Counter(dict.fromkeys(PHASES, 0))
        self._streams_lost = Counter(dict.fromkeys(STREAM_LOSSES, 0))
        self._decisions = DecisionMetrics(routing, modes)
        self._exemplars: dict[str, dict[tuple[str, ...], dict[float, Exemplar]]] = {_DURATION: {}, _TTFT: {}}
        self.ttft_bounds_s = tuple(self.queue_wait.bounds)
        self.tokenized, self.hashed = self._decisions.tokenized, self._decisions.hashed
        self.parsed = self._decisions.parse.observe
        """Record the seconds that reading a request took."""
        self.fallback = self._decisions.fallback
        self.rerouted = self._decisions.rerouted
        self.placed = self._decisions.placed
        Projection(registry, self.families)

    def arrived(self) -> tuple[int, list[int]]:
        """Return how many requests were read, and how many first tokens came, by bucket of `ttft_bounds_s`."""
        first_tokens = zip(*(seen.ttft.counts for seen in self.modes.values()), strict=True)
        return sum(self._decisions.parse.counts), [sum(each) for each in first_tokens]

    def rejected(self, reason: str) -> None:
        """A request was refused for load."""
        self._rejected[reason] += 1

    def retried(self, phase: str) -> None:
        """Another rank is tried."""
        self._retries[phase] += 1

    def stream_lost(self, why: StreamLoss) -> None:
        """A stream that had begun ended with an error."""
        self._streams_lost[why] += 1

    def traced(self, mode: str, trace_id: str, decision_id: str, duration_s: float, ttft_s: float | None) -> None:
        """The spans of a request that ended were sent: it becomes the exemplar of its latencies.

        `decision_id` is that of its first decision; empty: it was not understood.
        """
        labels = {"trace_id": trace_id} | ({"decision_id": decision_id} if decision_id else {})
        bounds = (*self.ttft_bounds_s, float("inf"))
        for name, seconds in ((_DURATION, duration_s), (_TTFT, ttft_s)):
            if seconds is not None:
                of_mode = self._exemplars[name].setdefault((mode,), {})
                of_mode[bounds[bisect_left(bounds, seconds)]] = Exemplar(labels, seconds)

    def families(self) -> Iterator[Family]:
        """Yield all counters."""
        self.follow()
        by_label: dict[str, dict[str, Any]] = {"mode": self.modes, "model": self.models, "worker": self.workers}
        models, workers = by_label["model"], by_label["worker"].items()
        requests = dict.fromkeys(product(models, self._modes, OUTCOMES), 0)
        requests |= {(model, *at): count for model, seen in models.items() for at, count in seen.requests.items()}
        yield counter("requests", "Requests by outcome", ("model", "mode", "outcome"), requests.items())
        yield gauge("inflight_requests", "Requests being served", rows=[((), self.inflight)])
        for name, meaning, label, field in _HISTOGRAMS:
            of_label = [((each,), getattr(seen, field)) for each, seen in by_label[label].items()]
            yield histogram(name, meaning, (label,), of_label, self._exemplars.get(name))
        for name, meaning, seen in (
            ("input_tokens", "Prompt tokens of answered requests; the sum is the base of a hit rate",
             self.input_tokens),
            ("output_tokens", "Output tokens of answers that state their number", self.output_tokens),
            ("queue_wait_seconds", "Time that a request waited in the queue", self.queue_wait),
        ):  # fmt: skip
            yield histogram(name, meaning, (), [((), seen)])
        for name, meaning, field in (
            ("predicted_cached_tokens", "Prompt tokens that the index predicted to be reused", "predicted_tokens"),
            ("actual_cached_tokens", "Prompt tokens that workers reported as reused", "actual_tokens"),
        ):
            yield counter(name, meaning, ("worker",), [((each,), getattr(seen, field)) for each, seen in workers])
        failures = chain(*(by_name((each,), dict.fromkeys(PHASES, 0) | seen.failures) for each, seen in workers))
        yield counter("worker_failures", "Attempts that failed at a worker, by phase", ("worker", "phase"), failures)
        for name, meaning, label, counts in (
            ("rejected", "Requests refused for load", "reason", self._rejected),
            ("retries", "Further attempts at another rank, by the phase in which the attempt before failed", "phase",
             self._retries),
            ("streams_lost", "Streams that ended with an error after their worker failed", "reason",
             self._streams_lost),
        ):  # fmt: skip
            yield counter(name, meaning, (label,), by_name((), counts))
        yield from self._decisions.families()
