"""Metrics of requests, from their head to their last byte, and of their decisions.

begin -> parsed -> tokenized, hashed -> [queue_waited] -> chosen -> first_token -> end
rejected, worker_failed, fallback: wherever it happens; retried: at the end. `Lease.end` counts answers and reuse:
error = predicted - actual: above 0 the index promised too much (evicted meanwhile), below 0 too little (in flight)

margin     the runner-up's cost minus the winner's
regret     the longest overlap of a candidate minus the winner's: the reuse that was given up for lower load
given up   by the term in which that candidate costs more by most; `not_cost` if it did not cost more: a
           session, a draw or a newcomer's share decided

Reading a decision's columns takes microseconds, so it is done at the scrape, for the last `SAMPLES_MAX` decisions
before it: a fair sample if there were more.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import chain, product
from typing import Any, get_args

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Exemplar

from kv_protocol.decision import ADDENDS
from kv_runtime.telemetry import Family, Mean, Projection, by_name, counter, gauge, histogram, summary
from router.decision.disaggregation import PLACEMENT_REASONS, PlacementReason
from router.decision.plan import REROUTES, STREAM_LOSSES, Reroute, StreamLoss
from router.decision.policies import MODES
from router.decision.routing import DecisionLog, Routing
from router.decision.verdict import Reason, Verdict
from router.http.accounts import LIMITS
from router.native import built
from router.queue.waiting import REFUSAL_REASONS

SAMPLES_MAX = 256
NOT_COST = "not_cost"
_CAUSES = (*ADDENDS, NOT_COST)
STAGES = ("parse", "tokenize", "hash", "match", "choose", "total")
"""The core measures the last three, of decisions that are carried out."""
REASONS: tuple[str, ...] = get_args(Reason)
APPROXIMATE = "approximate"
FALLBACKS = (APPROXIMATE, "not_encoded", "unmet_target")
"""`approximate`: the winner has no events, so its overlap was estimated from what was routed to it. `not_encoded`: the
prompt could not be encoded, so only load counted. `unmet_target`: the request was admitted, although no rank was
predicted to meet its targets."""
_STAGE_SECONDS = (1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0)
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
_COUNTED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rejected": ("Requests refused for load or an account's limit", "reason", REJECTIONS),
    "retries": ("Further attempts at another rank, by the phase in which the attempt before failed", "phase", PHASES),
    "streams_lost": ("Streams that ended with an error after their worker failed", "reason", STREAM_LOSSES),
    "request_turns": ("Requests that left their first plan, by cause", "reason", REROUTES),
    "prefill_placements": (
        "Prompts placed on decode workers or prefill workers by disaggregation.conditional, by cause",
        "reason", PLACEMENT_REASONS,
    ),
    "fallback": ("Decisions that were not made as configured, by cause", "reason", FALLBACKS),
}  # fmt: skip
"""By name: meaning, label, and the values that are there from the start."""


class Weighing:
    """Costs of winners, and causes of regret."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions, self._read_upto = decisions, decisions.added_total
        self._terms = {term: Mean() for term in ADDENDS}
        self._given_up_for = dict.fromkeys(_CAUSES, 0)

    def families(self) -> Iterator[Family]:
        """Yield the sums, including the decisions since the last call."""
        added_total = self._decisions.added_total
        for record in self._decisions.newest(min(SAMPLES_MAX, added_total - self._read_upto)):
            if record.verdict.is_timed:
                self._read(record.verdict)
        self._read_upto = added_total
        terms = [((term,), seen) for term, seen in self._terms.items()]
        meaning = "Terms of the winner's cost, of sampled decisions with costs in ms"
        yield summary("cost_term_seconds", meaning, ("term",), terms)
        meaning = "Regret by the term that it was for, of sampled decisions"
        yield counter("regret_term_blocks", meaning, ("term",), by_name((), self._given_up_for))

    def _read(self, verdict: Verdict) -> None:
        won = verdict.terms(verdict.winner_at)
        for term, seen in self._terms.items():
            seen.observe(getattr(won, f"{term}_ms") * 1e-3)
        if verdict.regret_blocks > 0:
            depths = verdict.overlap[0][verdict.rank_indices]
            longest = verdict.terms(int(np.argmax(depths)))
            excess = {term: getattr(longest, f"{term}_ms") - getattr(won, f"{term}_ms") for term in ADDENDS}
            most = max(excess, key=lambda term: excess[term])
            self._given_up_for[most if longest.cost > won.cost else NOT_COST] += verdict.regret_blocks


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
        self._modes, self._core, self._weighing = modes, routing.state.core, Weighing(routing.decisions)
        self._counts = {name: Counter(dict.fromkeys(values, 0)) for name, (_, _, values) in _COUNTED.items()}
        self._stages = {stage: built.Histogram(_STAGE_SECONDS) for stage in STAGES[:3]}
        self._exemplars: dict[str, dict[tuple[str, ...], dict[float, Exemplar]]] = {_DURATION: {}, _TTFT: {}}
        self.ttft_bounds_s = tuple(self.queue_wait.bounds)
        self.parsed = self._stages["parse"].observe
        """Record the seconds that reading a request took."""
        self.tokenized = self._stages["tokenize"].observe
        """Record the seconds that encoding a prompt took."""
        self.hashed = self._stages["hash"].observe
        """Record the seconds that hashing a prompt's blocks took; from any thread."""
        Projection(registry, self.families)

    def arrived(self) -> tuple[int, list[int]]:
        """Return how many requests were read, and how many first tokens came, by bucket of `ttft_bounds_s`."""
        first_tokens = zip(*(seen.ttft.counts for seen in self.modes.values()), strict=True)
        return sum(self._stages["parse"].counts), [sum(each) for each in first_tokens]

    def rejected(self, reason: str) -> None:
        """A request was refused for load, or an account's limit."""
        self._counts["rejected"][reason] += 1

    def retried(self, phase: str) -> None:
        """After an attempt that failed in this phase another rank was tried; counted when the request ends."""
        self._counts["retries"][phase] += 1

    def stream_lost(self, why: StreamLoss) -> None:
        """A stream that had begun ended with an error."""
        self._counts["streams_lost"][why] += 1

    def fallback(self, reason: str) -> None:
        """A decision was not made as configured; the core counts those that are `approximate`."""
        self._counts["fallback"][reason] += 1

    def rerouted(self, why: Reroute) -> None:
        """A request leaves its first plan."""
        self._counts["request_turns"][why] += 1

    def placed(self, reason: PlacementReason) -> None:
        """A prompt was placed, for this reason."""
        self._counts["prefill_placements"][reason] += 1

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
        yield from self._of_decisions()
        for name, (meaning, label, _) in _COUNTED.items():
            yield counter(name, meaning, (label,), by_name((), self._counts[name]))

    def _of_decisions(self) -> Iterator[Family]:
        every = (*self._stages.values(), *self._core.stages())
        stages = [((stage,), seen) for stage, seen in zip(STAGES, every, strict=True)]
        yield histogram("decision_duration_seconds", "Duration of a stage of decisions", ("stage",), stages)
        found, regret, margin_s, predicted_blocks, approximate = self._core.decided()
        self._counts["fallback"][APPROXIMATE] = approximate
        counted = dict.fromkeys(product(self._modes, REASONS), 0) | dict(found)
        meaning = "Decisions, by mode of the policy and by what decided"
        yield counter("decisions", meaning, ("policy", "reason"), counted.items())
        for name, meaning, seen in (
            ("decision_margin_seconds", "Runner-up's cost minus the winner's, of costs in ms", margin_s),
            ("regret_blocks", "Longest overlap of a candidate minus the winner's", regret),
        ):
            yield histogram(name, meaning, (), [((), seen)])
        yield from self._weighing.families()
        meaning = (
            "Blocks that the chosen rank was expected to hold because an earlier request's blocks were on their way"
        )
        yield counter("predicted_on_route_blocks", meaning, rows=[((), predicted_blocks)])
