"""The router's metrics: of requests, counted as they pass, and of its state, read at the scrape.

    A request's events, in order: begin, parsed, tokenized, hashed, [queue_waited], chosen, first_token, end;
    rejected, worker_failed, fallback: at any point; retried: at the end. `Lease.end` counts answers and reuse:
    error = predicted - actual: above 0 the index promised too much (evicted since), below 0 too little (reported later)

    margin     the runner-up's cost minus the winner's
    regret     the longest overlap of a candidate minus the winner's: the reuse that was given up for lower load
    given up   regret, by the term in which the candidate with the longest overlap exceeds the winner most; `not_cost`
               if it did not cost more: a session, a draw or a newcomer's share decided

On the request path counting is additions in C++ (`router/native/request_sums.hpp`); samples are made at the scrape.
Every label set exists at 0 from the start, and is removed with the model or worker that it names. Reading a decision's
columns takes microseconds, so it is done at the scrape, for the last `SAMPLES_MAX` decisions before it: a fair sample
if there were more.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import chain, product
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Exemplar

from kv_protocol.decision import ADDENDS
from kv_runtime.http.acceptor import ACCEPT_ERRORS
from kv_runtime.telemetry import Family, Mean, Projection, Sample, by_name, counter, gauge, histogram, summary
from kv_runtime.text.encoders import KeptSegments
from router.decision.disaggregation import PLACEMENT_REASONS
from router.decision.plan import REROUTES, STREAM_LOSSES
from router.decision.policies import MODES
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.decision.verdict import Reason, Verdict
from router.feeds.feeds import RouterFeeds
from router.fleet.breakers import BREAKER_STATES
from router.fleet.trust import PARITY_FIELDS, TRUST_STATES
from router.http import accounts
from router.http.plane import HttpPlane
from router.native import built
from router.prompt.prompts import ModelPrompts
from router.queue.waiting import REFUSAL_REASONS, RequestQueue

Outcome = Literal["placed", "answered", "refused", "left"]
"""What the picker did: named a worker; answered the client itself; answered an error; lost the gateway before that."""
ENCODERS = ("byte", "hf", "fast", "none")
REFUSED_STATUSES = (400, 401, 403, 408, 413, 415, 417, 421, 431, 501, 503, 505)
"""Statuses with which the data plane refuses a request before routing: malformed, too large, too slow, no key."""
_OF_RANKS = {
    "active_requests": "Requests that have a lease on the rank",
    "active_blocks": "Distinct blocks of the requests that have a lease on the rank",
    "prefill_tokens_queued": "Uncached prompt tokens of the rank's leases that have no first token yet",
    "foreign_requests": "Requests that the rank's engine reports beyond its leases",
    "reported_running": "Running requests, as the rank's engine reports",
    "reported_waiting": "Waiting requests, as the rank's engine reports",
    "reported_used_blocks": "Blocks in use, as the rank's engine reports",
}
"""Gauges of the ledger, by field of `RankLoad`."""
_RANK = ("worker", "dp_rank")
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
REJECTIONS = ("inflight_requests_max", "unmet_target", *accounts.REJECTIONS, *REFUSAL_REASONS)
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
    ("input_tokens", "Prompt tokens of answered requests; the sum is the base of a hit rate", "", "input_tokens"),
    ("output_tokens", "Output tokens of answers that state their number", "", "output_tokens"),
    ("queue_wait_seconds", "Time that a request waited in the queue", "", "queue_wait"),
)  # fmt: skip
"""Name, meaning, label, and the field of the sums by that label; without a label, of the sums of all requests."""
Counted = Literal["rejected", "retries", "streams_lost", "request_turns", "prefill_placements", "fallback"]
_COUNTED: dict[Counted, tuple[str, str, tuple[str, ...]]] = {
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
"""Counters by name: meaning, label, and the label's values that are there from the start."""


class RequestMetrics(built.RequestSums):
    """Counters and distributions of requests; each call costs a fraction of a microsecond.

    count         counts an event of one of the counters in `_COUNTED`
    observer      returns the function that adds the duration of a stage of a decision
    inflight      how many requests are being served
    end           counts a request that ended; an unknown model is counted as `unknown`
    queue_waited  adds the time after which a request left the queue, for any reason
    first_token   adds the time from a request's routing to the first token of its answer, from this worker
    worker_failed counts a request that a worker failed
    """

    def __init__(self, registry: CollectorRegistry, routing: Routing, modes: tuple[str, ...] = tuple(MODES)) -> None:
        super().__init__(routing.state.fleet, modes)
        self._modes, self._core, self._decisions = modes, routing.state.core, routing.decisions
        self._weighed_upto = self._decisions.added_total
        self._terms = {term: Mean() for term in ADDENDS}
        self._given_up_for = dict.fromkeys(_CAUSES, 0)
        self._counts = {name: Counter(dict.fromkeys(values, 0)) for name, (_, _, values) in _COUNTED.items()}
        self._stages = {stage: built.Histogram(_STAGE_SECONDS) for stage in STAGES[:3]}
        self._exemplars: dict[str, dict[tuple[str, ...], dict[float, Exemplar]]] = {_DURATION: {}, _TTFT: {}}
        self.ttft_bounds_s = tuple(self.queue_wait.bounds)
        Projection(registry, self.families)

    def arrived(self) -> tuple[int, list[int]]:
        """Return how many requests were read, and how many first tokens came, by bucket of `ttft_bounds_s`."""
        first_tokens = zip(*(seen.ttft.counts for seen in self.modes.values()), strict=True)
        return sum(self._stages["parse"].counts), [sum(each) for each in first_tokens]

    def count(self, name: Counted, value: str) -> None:
        """Count one event under this value of the counter's label. The core counts the fallback `approximate`."""
        self._counts[name][value] += 1

    def observer(self, stage: str) -> Callable[[float], None]:
        """Return the function that adds the duration of a stage that the core does not measure, from any thread."""
        return self._stages[stage].observe

    def traced(self, mode: str, trace_id: str, decision_id: str, duration_s: float, ttft_s: float | None) -> None:
        """Keep a request as the exemplar of its latencies. Its spans must have been sent.

        `decision_id` names its first decision; empty: the request was not understood.
        """
        labels = {"trace_id": trace_id} | ({"decision_id": decision_id} if decision_id else {})
        bounds = (*self.ttft_bounds_s, float("inf"))
        for name, seconds in ((_DURATION, duration_s), (_TTFT, ttft_s)):
            if seconds is not None:
                of_mode = self._exemplars[name].setdefault((mode,), {})
                of_mode[bounds[bisect_left(bounds, seconds)]] = Exemplar(labels, seconds)

    def families(self) -> Iterator[Family]:
        """Yield all metrics of requests."""
        self.follow()
        models, workers = self.models, self.workers.items()
        requests = dict.fromkeys(product(models, self._modes, OUTCOMES), 0)
        requests |= {(model, *at): count for model, seen in models.items() for at, count in seen.requests.items()}
        yield counter("requests", "Requests by outcome", ("model", "mode", "outcome"), requests.items())
        yield gauge("inflight_requests", "Requests being served", rows=[((), self.inflight)])
        sums: dict[str, Any] = {"mode": self.modes, "model": models, "worker": dict(workers)}
        by_label = {label: [((each,), seen) for each, seen in found.items()] for label, found in sums.items()}
        for name, meaning, label, field in _HISTOGRAMS:
            seen_by = [(at, getattr(seen, field)) for at, seen in by_label.get(label, [((), self)])]
            yield histogram(name, meaning, (label,) if label else (), seen_by, self._exemplars.get(name))
        self._stages.update(zip(STAGES[3:], self._core.stages(), strict=True))
        stages = [((stage,), seen) for stage, seen in self._stages.items()]
        yield histogram("decision_duration_seconds", "Duration of a stage of decisions", ("stage",), stages)
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
        found, regret, margin_s, predicted_blocks, approximate = self._core.decided()
        self._counts["fallback"][APPROXIMATE] = approximate
        counted = dict.fromkeys(product(self._modes, REASONS), 0) | dict(found)
        meaning = "Decisions, by mode of the policy and by what decided"
        yield counter("decisions", meaning, ("policy", "reason"), counted.items())
        for name, meaning, seen in (
            ("decision_margin_seconds", "Runner-up's cost minus the winner's", margin_s),
            ("regret_blocks", "Longest overlap of a candidate minus the winner's", regret),
        ):
            yield histogram(name, meaning, (), [((), seen)])
        yield from self._of_costs()
        meaning = (
            "Blocks that the chosen rank was expected to hold because an earlier request's blocks were on their way"
        )
        yield counter("predicted_on_route_blocks", meaning, rows=[((), predicted_blocks)])

    def _of_costs(self) -> Iterator[Family]:
        """Yield costs of winners and causes of regret, including the decisions since the last scrape."""
        for record in self._decisions.since(self._weighed_upto, SAMPLES_MAX):
            if record.verdict.is_timed:
                self._weigh(record.verdict)
        self._weighed_upto = self._decisions.added_total
        terms = [((term,), seen) for term, seen in self._terms.items()]
        yield summary("cost_term_seconds", "Terms of the winner's cost, of sampled decisions", ("term",), terms)
        meaning = "Regret by the term that it was for, of sampled decisions"
        yield counter("regret_term_blocks", meaning, ("term",), by_name((), self._given_up_for))

    def _weigh(self, verdict: Verdict) -> None:
        won = verdict.terms(verdict.winner_at)
        for term, seen in self._terms.items():
            seen.observe(getattr(won, f"{term}_ms") * 1e-3)
        if verdict.regret_blocks > 0:
            depths = verdict.overlap[0][verdict.rank_indices]
            longest = verdict.terms(int(np.argmax(depths)))
            excess = {term: getattr(longest, f"{term}_ms") - getattr(won, f"{term}_ms") for term in ADDENDS}
            most = max(excess, key=lambda term: excess[term])
            self._given_up_for[most if longest.cost > won.cost else NOT_COST] += verdict.regret_blocks


class PickerStatistics(msgspec.Struct):
    """The present streams, and totals since the start."""

    streams: int = 0
    body_bytes: int = 0
    outcomes: Counter[Outcome] = msgspec.field(default_factory=Counter)
    moved: int = 0
    failed: int = 0


def picker_families(statistics: PickerStatistics) -> Iterator[Family]:
    """Yield the picker's families; without a picker they are 0."""
    yield gauge("picker_streams", "Requests of gateways that are read or served now", rows=[((), statistics.streams)])
    yield gauge("picker_body_bytes", "Bytes of their bodies in memory", rows=[((), statistics.body_bytes)])
    meaning = (
        "Requests of gateways, by what the picker said: placed, answered, refused, or left before it said anything"
    )
    outcomes = {each: statistics.outcomes[each] for each in get_args(Outcome)}
    yield counter("picker_requests", meaning, ("outcome",), by_name((), outcomes))
    for name, meaning, count in (
        ("picker_served_elsewhere", "Requests that another worker than the picked one answered", statistics.moved),
        ("picker_failed_streams", "Streams that ended by a defect, of the gateway or of the router", statistics.failed),
    ):
        yield counter(name, meaning, rows=[((), count)])


def prompt_families(prompts: ModelPrompts) -> Iterator[Family]:
    """Yield the figures of encoders, of the cache, and of the threads."""
    encoder, pool = prompts.encoder, prompts.pool
    kept = encoder.kept() if encoder else KeptSegments()
    told = "1 for the encoder in use: byte, hf (tokenizers), fast (fastokens), or none"
    encoders = {name: name == prompts.encoder_name for name in ENCODERS}
    yield gauge("encoder_info", told, ("encoder",), by_name((), encoders))
    meaning = "Bytes of text: encoded for an earlier prompt, or new"
    yield counter("encoder_bytes", meaning, ("part",), by_name((), {"known": kept.hit_bytes, "new": kept.miss_bytes}))
    images = {"yes": prompts.images_seen, "no": prompts.images_unseen}
    meaning = "Images in prompts: hashed for routing (yes) or not (no)"
    yield counter("prompt_images", meaning, ("seen",), by_name((), images))
    meaning = "Prompts that only the worker knows, by the key of the request that is why"
    yield counter("prompts_unrendered", meaning, ("key",), by_name((), prompts.unrendered))
    for kind, name, meaning, value in (
        (counter, "encoder_failures", "Texts that the fast encoder failed at; hf encoded them",
         encoder.failures if encoder else 0),
        (counter, "prompts_off_loop", "Prompts encoded by threads", pool.submitted),
        (counter, "prompts_cancelled", "Prompts dropped because their client left before they were encoded",
         pool.cancelled),
        (counter, "prompts_refused", "Prompts refused because too much text waited to be encoded", pool.refused),
        (gauge, "prompts_waiting_bytes",
         "Bytes of request bodies, without images, that wait for an encoding thread or are in one", pool.waiting_bytes),
        (gauge, "encoder_cache_bytes", "Memory of segments of chats that are kept with their ids", kept.bytes),
        (gauge, "encoder_cache_segments", "Segments that are kept", kept.entries),
    ):  # fmt: skip
        yield kind(name, meaning, rows=[((), value)])


def http_families(plane: HttpPlane) -> Iterator[Family]:
    """Yield the present sockets, and totals of former ones."""
    upstreams, capacity = plane.upstreams, plane.capacity
    open_now = {
        "clients": len(plane.connections), "workers": len(upstreams.connections), "workers_idle": upstreams.idle
    }  # fmt: skip
    most = {"clients": capacity.clients, "workers": capacity.workers}
    for kind, name, meaning, label, counts in (
        (gauge, "http_connections", "Open connections: clients, workers, workers_idle", "side", open_now),
        (gauge, "http_connections_max",
         "Connections that may be open at once: 16,384, or fewer where the limit of open files is lower", "side", most),
        (counter, "http_accept_failures", "Connections that could not be accepted, by error", "error",
         dict.fromkeys(ACCEPT_ERRORS, 0) | plane.acceptor.failures),
        (counter, "http_refused",
         "Requests refused before routing: malformed, too large, too slow or without a key, by status", "status",
         dict.fromkeys(REFUSED_STATUSES, 0) | plane.refusals),
        (counter, "http_credentials_read",
         "Changed files of accounts and certificates that were read, by outcome; failed: the former stay in force",
         "outcome", plane.credentials.loads),
    ):  # fmt: skip
        yield kind(name, meaning, (label,), by_name((), counts))
    for name, meaning, count in (
        ("http_clients_gone", "Clients that left before the end of their answer", plane.gone),
        ("http_handshakes_failed", "TLS handshakes with clients that failed", plane.handshakes_failed),
        ("http_client_connections", "Connections that clients opened", plane.accepted),
        ("http_worker_connections", "Connections that the router opened to workers", upstreams.opened),
    ):
        yield counter(name, meaning, rows=[((), count)])


def state_families(state: RouterState, feeds: RouterFeeds, queue: RequestQueue) -> Iterator[Family]:
    """Yield the running version, the ledger, the waiting requests, and what feeds refused."""
    yield gauge("build_info", "1 for the version that this process runs", ("version",), [((version("kv-router"),), 1)])
    loads, core = [(_at(rank), load) for rank, load in state.loads().items()], state.core
    for name, meaning in _OF_RANKS.items():
        yield gauge(f"ledger_{name}", meaning, _RANK, [(at, getattr(load, name)) for at, load in loads])
    meaning = "Requests in the rank engine's last report minus the rank's leases"
    yield gauge("ledger_difference_requests", meaning, _RANK, [(_at(rank), by) for rank, by in core.differences()])
    workers = list(state.fleet.workers())
    yield gauge("workers", "Workers that are registered", rows=[((), len(workers))])
    for name, meaning, count in (
        ("leases_expired", "Leases that expired: nothing was heard of their request for 300 s", core.expired_total),
        ("leases_corrected", "Leases ended because the engine does not report their requests", core.corrected_total),
        ("feed_refused_messages", "Fleet and load messages that were refused, for any reason",
         feeds.refused_messages_total),
    ):  # fmt: skip
        yield counter(name, meaning, rows=[((), count)])
    refused = [*by_name((), feeds.gate.refused_total), *by_name((), feeds.events_without_effect)]
    yield counter("fleet_refused", "Fleet events that the router refused", ("reason",), refused)
    meaning = "Heartbeats of instances, and load reports of ranks, that are not registered"
    yield counter("unregistered_messages", meaning, ("kind",), by_name((), feeds.unregistered_messages))
    yield gauge("queued_requests", "Requests that wait for room in the fleet", rows=[((), len(queue))])
    yield gauge("queued_tokens", "Uncached tokens of the requests that wait", rows=[((), queue.tokens)])


def rank_families(routing: Routing) -> Iterator[Family]:
    """Yield each rank's trust, its blocks in the approximate index, whether it may be chosen, and its learnt speed."""
    trusts = [_one_of(_at(rank), trust.state, TRUST_STATES) for rank, trust in routing.trust().items()]
    yield gauge("rank_trust", "1 for the rank's present trust state", (*_RANK, "trust"), chain(*trusts))
    state, now_s = routing.state, routing.clock.now()
    fleet, breakers, core = state.fleet, state.breakers, state.core
    meaning = "1 if the field of the worker's registration equals what the router hashes prompts with, else 0"
    parity = [
        ((worker_id, field), all(each.field != field for each in disparities))
        for worker_id, disparities in fleet.parity(now_s).items()
        for field in PARITY_FIELDS
    ]
    yield gauge("worker_parity", meaning, ("worker", "field"), parity)
    meaning = (
        "Times that requests showed a rank to be predicted wrongly: it reuses less than predicted, or what was not"
    )
    yield counter("predictions_doubted", meaning, ("doubt",), by_name((), routing.calibration.begun_total))
    blocks = [(_at(rank), count) for rank, count in core.routed_blocks()]
    yield gauge("approximate_blocks", "Blocks in the approximate index, by rank", _RANK, blocks)
    forgotten = dict(zip(("expired", "evicted", "left"), core.routed_totals(), strict=False))
    meaning = "Blocks that left the approximate index: expired, evicted for room, or their worker left"
    yield counter("approximate_forgotten_blocks", meaning, ("cause",), by_name((), forgotten))
    yield gauge("policy_info", "1 for the mode in force", ("mode",), [((routing.policy.mode,), 1)])
    ranks = [(rank, worker) for worker in fleet.workers() for rank in worker.registration.ranks]
    fit = [(_at(rank), not (fleet.unfit(worker, now_s) or breakers.unfit(rank, now_s))) for rank, worker in ranks]
    yield gauge("rank_fit", "1 while the rank may take new work", _RANK, fit)
    states = chain(*(_one_of(_at(rank), breakers.state(rank, now_s), BREAKER_STATES) for rank, _ in ranks))
    yield gauge("breaker_state", "1 for the present state of the rank's breaker", (*_RANK, "state"), states)
    statistics = breakers.statistics
    for name, meaning, count in (
        ("breaker_openings", "Times that a breaker opened", statistics.opened_total),
        ("worker_back_pressure", "Answers 429 and 503 of workers", statistics.back_pressure_total),
    ):
        yield counter(name, meaning, rows=[((), count)])
    factors = state.rate_factors().items()
    found = chain(*(by_name(_at(rank), {"prefill": each.prefill, "decode": each.decode}) for rank, each in factors))
    meaning = "Learnt time of the rank's work, as a multiple of a reference engine's"
    yield gauge("rate_factor", meaning, (*_RANK, "work"), found)
    tokens = [((each.model,), each.output_tokens) for each in state.learnt()]
    yield gauge("expected_output_tokens", "Learnt length of an answer", ("model",), tokens)
    meaning = "Latencies that were not learnt from because they are impossible"
    yield counter("rates_refused", meaning, rows=[((), core.rates_refused_total)])


def _at(rank: tuple[str, int]) -> tuple[str, str]:
    return rank[0], str(rank[1])


def _one_of(at: tuple[str, ...], present: str, states: Iterable[str]) -> list[Sample]:
    return by_name(at, {state: state == present for state in states})
