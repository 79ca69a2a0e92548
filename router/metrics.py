"""The router's figures: what it counts itself as requests pass, and projections of its state at scrape time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_protocol.decision import Decision
from kv_runtime.telemetry import PREFIX, Family, counter, gauge
from router.core.decide import MODES
from router.core.state import RouterState
from router.core.trust import PARITY_FIELDS, TRUST_STATES
from router.feeds import RouterFeeds
from router.routing import Routing

PHASES = ("connect", "first_byte", "body")
_SECONDS = (1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 0.6, 1.6, 4.0, 10.0, 25.0, 60.0, 160.0)
_DECISION_SECONDS = (1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0)
_ERROR_TOKENS = (-8192, -2048, -512, -128, -32, -1, 0, 32, 128, 512, 2048, 8192)


class RequestMetrics:
    """Counters and histograms of requests; every label set of a closed label exists from the start."""

    def __init__(self, registry: CollectorRegistry, state: RouterState) -> None:
        self._state = state
        self._requests = Counter(
            f"{PREFIX}requests", "Requests by outcome", ["model", "mode", "outcome"], registry=registry
        )
        self._duration = Histogram(
            f"{PREFIX}request_duration_seconds", "From head to last byte", ["mode"], registry=registry, buckets=_SECONDS
        )
        self._ttft = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From being routed to the answer's first byte",
            ["mode"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._decision = Histogram(
            f"{PREFIX}decision_duration_seconds",
            "Duration of a decision by stage",
            ["stage"],
            registry=registry,
            buckets=_DECISION_SECONDS,
        )
        self._decisions = Counter(f"{PREFIX}decisions", "Decisions by policy", ["policy"], registry=registry)
        self._on_their_way = Counter(
            f"{PREFIX}predicted_on_route_blocks",
            "Blocks that the chosen rank was counted on to have because they were on their way there",
            registry=registry,
        )
        self._input = Counter(f"{PREFIX}input_tokens", "Prompt tokens routed", registry=registry)
        self._predicted = Counter(
            f"{PREFIX}predicted_cached_tokens", "Tokens that the index said a cache would give", registry=registry
        )
        self._actual = Counter(
            f"{PREFIX}actual_cached_tokens", "Tokens that workers said they reused", registry=registry
        )
        self._error = Histogram(
            f"{PREFIX}prediction_error_tokens", "Predicted minus actual", registry=registry, buckets=_ERROR_TOKENS
        )
        self._inflight = Gauge(f"{PREFIX}inflight_requests", "Requests being served", registry=registry)
        self._rejected = Counter(f"{PREFIX}rejected", "Requests refused for load", ["reason"], registry=registry)
        self._retries = Counter(f"{PREFIX}retries", "Attempts at another rank", ["phase"], registry=registry)
        self._failures = Counter(
            f"{PREFIX}worker_failures", "Workers that failed a request", ["worker", "phase"], registry=registry
        )
        for mode in MODES:
            self._decisions.labels(mode)
            self._duration.labels(mode)
            self._ttft.labels(mode)
        for phase in PHASES:
            self._retries.labels(phase)
        self._rejected.labels("inflight_requests_max")
        self._total = self._decision.labels("total")

    def begin(self) -> float:
        """A request came; return when."""
        self._inflight.inc()
        return perf_counter()

    def end(self, began: float, model: str, mode: str, outcome: str) -> None:
        """The request that `begin` counted is over."""
        self._inflight.dec()
        known = model if model in self._state.fleet.models() else "unknown"
        self._requests.labels(known, mode, outcome).inc()
        self._duration.labels(mode).observe(perf_counter() - began)

    def rejected(self, reason: str) -> None:
        """A request was refused for load."""
        self._rejected.labels(reason).inc()

    def decision_timer(self) -> AbstractContextManager[object]:
        """Time one decision: view, match, cost and choice."""
        return self._total.time()

    def decided(self, decision: Decision) -> None:
        """A decision was taken."""
        self._decisions.labels(decision.policy).inc()
        self._on_their_way.inc(decision.chosen.expected_blocks - decision.chosen.overlap_blocks[0])

    def retried(self, phase: str) -> None:
        """Another rank is tried."""
        self._retries.labels(phase).inc()

    def worker_failed(self, worker_id: str, phase: str) -> None:
        """A worker failed a request."""
        self._failures.labels(worker_id, phase).inc()

    def settled(self, decision: Decision, cached_tokens: int | None, ttft_s: float | None) -> None:
        """A request was answered; `cached_tokens` is the worker's own count, where it gave one."""
        self._input.inc(decision.isl_tokens)
        if ttft_s is not None:
            self._ttft.labels(decision.policy).observe(ttft_s)
        if cached_tokens is not None:
            predicted = decision.chosen.overlap_blocks[0] * decision.block_size
            self._predicted.inc(predicted)
            self._actual.inc(cached_tokens)
            self._error.observe(predicted - cached_tokens)


def state_families(state: RouterState, feeds: RouterFeeds) -> Iterator[Family]:
    """Yield what the state shows at this moment."""
    labels = ("worker", "dp_rank")
    loads = [((rank.worker_id, str(rank.dp_rank)), load) for rank, load in state.ledger.loads().items()]
    for name, meaning in (
        ("active_requests", "Requests promised to a rank and not over"),
        ("active_blocks", "Distinct blocks of the requests promised to a rank"),
        ("prefill_tokens_queued", "Uncached tokens promised to a rank and not past their first token"),
        ("reported_running", "Requests that the rank's engine says it runs"),
        ("reported_waiting", "Requests that wait, by the engine's word"),
        ("reported_used_blocks", "Blocks in use, by the engine's word"),
    ):
        yield gauge(f"ledger_{name}", meaning, labels, [(at, float(getattr(load, name))) for at, load in loads])
    yield counter("leases_expired", "Promises that nobody ended", (), [((), float(state.ledger.expired_total))])
    workers = list(state.fleet.workers())
    yield gauge("workers", "Workers that are registered", (), [((), float(len(workers)))])
    refused = float(feeds.refused_messages_total)
    yield counter("feed_refused_messages", "Fleet and load messages that could not be read", (), [((), refused)])


def trust_families(routing: Routing) -> Iterator[Family]:
    """Yield how far each rank is trusted, what differs at its worker, and what there is in place of its events."""
    yield gauge(
        "rank_trust",
        "1 for the rank's present trust state",
        ("worker", "dp_rank", "trust"),
        [
            ((rank.worker_id, str(rank.dp_rank), state), float(state == trust.state))
            for rank, trust in routing.trust().items()
            for state in TRUST_STATES
        ],
    )
    yield gauge(
        "worker_parity",
        "1 where the worker registered what prompts are hashed with, 0 where it differs",
        ("worker", "field"),
        [
            ((worker_id, field), float(all(each.field != field for each in disparities)))
            for worker_id, disparities in routing.state.fleet.parity(routing.clock.now()).items()
            for field in PARITY_FIELDS
        ],
    )
    approximate = routing.state.approximate.statistics()
    blocks = [((rank.worker_id, str(rank.dp_rank)), float(count)) for rank, count in approximate.blocks.items()]
    yield gauge("approximate_blocks", "Blocks routed to a rank that count still", ("worker", "dp_rank"), blocks)
    forgotten = [
        (("expired",), float(approximate.expired_blocks_total)),
        (("evicted",), float(approximate.evicted_blocks_total)),
        (("left",), float(approximate.left_blocks_total)),
    ]
    yield counter("approximate_forgotten_blocks", "Routed blocks that count no more, by cause", ("cause",), forgotten)
