"""Metrics of requests, from their head to their last byte.

begin -> parsed -> tokenized, hashed -> [queue_waited] -> chosen -> first_token -> finished, settled -> end
rejected, retried, worker_failed, fallback: wherever it happens
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from prometheus_client import CollectorRegistry

from kv_runtime.telemetry import Distribution, Family, Projection, by_name, counter, gauge, histogram
from router.decision.plan import STREAM_LOSSES, StreamLoss
from router.decision.policies import MODES
from router.decision.routing import Routing
from router.http.accounts import LIMITS
from router.metrics.decision import DecisionMetrics
from router.metrics.prediction import PHASES, WorkerMetrics
from router.queue.waiting import REFUSAL_REASONS

OUTCOMES = ("ok", "refused", "failed", "cancelled")
REJECTIONS = ("inflight_requests_max", "unmet_target", *LIMITS, *REFUSAL_REASONS)
"""Too many requests in flight; no rank is predicted to meet the targets; an account's limits; refused by the queue."""
UNKNOWN_MODEL = "unknown"
_WAITING_MAX = 512
"""Observations that wait to be sorted into buckets."""
_SECONDS = (1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 0.6, 1.6, 4.0, 10.0, 25.0, 60.0, 160.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class _ByMode(dict[str, Distribution]):
    """Seconds by mode; the configuration may add modes to those that exist from the start."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__({mode: Distribution(_SECONDS) for mode in modes})

    def __missing__(self, mode: str) -> Distribution:
        seen = self[mode] = Distribution(_SECONDS)
        return seen


class RequestMetrics:
    """Counters and distributions of requests; each call costs a fraction of a microsecond."""

    ttft_bounds_s = _SECONDS

    def __init__(self, registry: CollectorRegistry, routing: Routing, modes: tuple[str, ...] = tuple(MODES)) -> None:
        self._fleet = routing.state.fleet
        self._modes = modes
        self.inflight = 0
        """Requests that are being served."""
        self._requests = Counter[tuple[str, str, str]]()
        self._duration, self._ttft, self._itl = _ByMode(modes), _ByMode(modes), _ByMode(modes)
        self._ttft_of_model = {UNKNOWN_MODEL: Distribution(_SECONDS)}
        self._input, self._output = Distribution(_TOKENS), Distribution(_TOKENS)
        self._queue_wait = Distribution(_SECONDS)
        self._rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self._retries = Counter(dict.fromkeys(PHASES, 0))
        self._streams_lost = Counter(dict.fromkeys(STREAM_LOSSES, 0))
        self._decisions = DecisionMetrics(routing, modes)
        self._workers = WorkerMetrics(self._fleet)
        self.tokenized, self.hashed = self._decisions.tokenized, self._decisions.hashed
        self.parsed = self._decisions.parse.observe
        """Record the seconds that reading a request took."""
        self._ended = 0
        self.fallback = self._decisions.fallback
        self.rerouted = self._decisions.rerouted
        self.placed = self._decisions.placed
        self.settled = self._workers.settled
        self.worker_failed = self._workers.worker_failed
        Projection(registry, self.families)

    def arrived(self) -> tuple[int, list[int]]:
        """Return how many requests were read, and how many first tokens came, by bucket of `ttft_bounds_s`."""
        first_tokens = zip(*(seen.counts for seen in self._ttft.values()), strict=True)
        return sum(self._decisions.parse.counts), [sum(each) for each in first_tokens]

    def _distributions(self) -> Iterator[Distribution]:
        for by_mode in (self._duration, self._ttft, self._itl, self._ttft_of_model):
            yield from by_mode.values()
        yield from (self._input, self._output, self._queue_wait)
        yield from self._decisions.distributions
        yield from self._workers.distributions

    def end(self, model: str, mode: str, outcome: str, duration_s: float) -> None:
        """A request ended; an unknown model is counted as `unknown`. Pending observations are settled now and then."""
        self.inflight -= 1
        self._ended += 1
        if not self._ended % _WAITING_MAX:
            for each in self._distributions():
                each.settle()
        self._duration[mode].observe(duration_s)
        key = model, mode, outcome
        if key not in self._requests:
            key = self._known(model), mode, outcome
        self._requests[key] += 1

    def rejected(self, reason: str) -> None:
        """A request was refused for load."""
        self._rejected[reason] += 1

    def queue_waited(self, seconds: float) -> None:
        """A request left the queue, for any reason, after this time."""
        self._queue_wait.observe(seconds)

    def retried(self, phase: str) -> None:
        """Another rank is tried."""
        self._retries[phase] += 1

    def stream_lost(self, why: StreamLoss) -> None:
        """A stream that had begun ended with an error."""
        self._streams_lost[why] += 1

    def first_token(self, mode: str, model: str, worker_id: str, ttft_s: float) -> None:
        """The first token of an answer came from this worker this long after the request was routed."""
        self._ttft[mode].observe(ttft_s)
        of_model = self._ttft_of_model.get(model)  # an empty one is false
        (self._ttft_of(model) if of_model is None else of_model).observe(ttft_s)
        self._workers.first_token(worker_id, ttft_s)

    def traced(self, mode: str, trace_id: str, decision_id: str, duration_s: float, ttft_s: float | None) -> None:
        """The spans of a request that ended were sent: it becomes the exemplar of its latencies.

        `decision_id` is that of its first decision; empty: it was not understood.
        """
        labels = {"trace_id": trace_id} | ({"decision_id": decision_id} if decision_id else {})
        self._duration[mode].exemplify(duration_s, labels)
        if ttft_s is not None:
            self._ttft[mode].exemplify(ttft_s, labels)

    def finished(self, mode: str, input_tokens: int, output_tokens: int | None, itl_s: float | None) -> None:
        """An answer is complete. `output_tokens` and `itl_s` are None if unknown."""
        self._input.observe(input_tokens)
        if output_tokens is not None:
            self._output.observe(output_tokens)
        if itl_s is not None:
            self._itl[mode].observe(itl_s)

    def _ttft_of(self, model: str) -> Distribution:
        return self._ttft_of_model.setdefault(self._known(model), Distribution(_SECONDS))

    def _known(self, model: str) -> str:
        return model if model in self._fleet.models() else UNKNOWN_MODEL

    def _follow_the_fleet(self) -> None:
        """Keep counters for exactly the models that are served."""
        models = (*self._fleet.models(), UNKNOWN_MODEL)
        served = {at: count for at, count in self._requests.items() if at[0] in models}
        self._requests = Counter(dict.fromkeys(product(models, self._modes, OUTCOMES), 0) | served)
        self._ttft_of_model = {model: self._ttft_of(model) for model in models}

    def families(self) -> Iterator[Family]:
        """Yield all counters."""
        self._follow_the_fleet()
        yield counter("requests", "Requests by outcome", ("model", "mode", "outcome"), self._requests.items())
        yield gauge("inflight_requests", "Requests being served", rows=[((), self.inflight)])
        for name, meaning, by_mode in (
            ("request_duration_seconds", "Time from a request's head to the last byte of its answer", self._duration),
            (
                "time_to_first_token_seconds",
                "Time from the routing of a request to its first token, where known",
                self._ttft,
            ),
            ("inter_token_latency_seconds", "Mean time between the tokens of an answer, where known", self._itl),
        ):
            yield histogram(name, meaning, ("mode",), [((mode,), seen) for mode, seen in by_mode.items()])
        by_model = [((model,), seen) for model, seen in self._ttft_of_model.items()]
        meaning = "Time from a request's routing to its first token, where known, by requested model"
        yield histogram("model_time_to_first_token_seconds", meaning, ("model",), by_model)
        for name, meaning, seen in (
            ("input_tokens", "Prompt tokens of answered requests; the sum is the base of a hit rate", self._input),
            ("output_tokens", "Output tokens of answers that state their number", self._output),
            ("queue_wait_seconds", "Time that a request waited in the queue", self._queue_wait),
        ):
            yield histogram(name, meaning, (), [((), seen)])
        for name, meaning, label, counts in (
            ("rejected", "Requests refused for load", "reason", self._rejected),
            (
                "retries",
                "Further attempts at another rank, by the phase in which the attempt before failed",
                "phase",
                self._retries,
            ),
            (
                "streams_lost",
                "Streams that ended with an error after their worker failed",
                "reason",
                self._streams_lost,
            ),
        ):
            yield counter(name, meaning, (label,), by_name((), counts))
        yield from self._decisions.families()
        yield from self._workers.families()
