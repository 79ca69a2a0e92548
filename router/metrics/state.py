"""Metrics of the router's state at scrape time: promised work, trust, parity, approximate ranks."""

from collections.abc import Iterator
from importlib.metadata import version

from kv_runtime.telemetry import Family, counter, gauge
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.feeds.feeds import RouterFeeds
from router.fleet.breakers import BREAKER_STATES
from router.fleet.trust import PARITY_FIELDS, TRUST_STATES
from router.queue.waiting import QueueStatistics


def state_families(state: RouterState, feeds: RouterFeeds) -> Iterator[Family]:
    """Yield the figures of the present state."""
    labels = ("worker", "dp_rank")
    loads = [((rank.worker_id, str(rank.dp_rank)), load) for rank, load in state.loads().items()]
    for name, meaning in (
        ("active_requests", "Requests that have a lease on the rank"),
        ("active_blocks", "Distinct blocks of the requests that have a lease on the rank"),
        ("prefill_tokens_queued", "Uncached prompt tokens of the rank's leases that have no first token yet"),
        ("foreign_requests", "Requests that the rank's engine reports beyond its leases"),
        ("reported_running", "Running requests, as the rank's engine reports"),
        ("reported_waiting", "Waiting requests, as the rank's engine reports"),
        ("reported_used_blocks", "Blocks in use, as the rank's engine reports"),
    ):
        yield gauge(f"ledger_{name}", meaning, labels, [(at, float(getattr(load, name))) for at, load in loads])
    core = state.core
    differences = [((worker_id, str(dp_rank)), float(by)) for (worker_id, dp_rank), by in core.differences()]
    meaning = "Requests in the rank engine's last report minus the rank's leases"
    yield gauge("ledger_difference_requests", meaning, labels, differences)
    for name, meaning, count in (
        (
            "leases_expired",
            "Leases that expired: nothing was heard of their request for 300 s",
            core.expired_total,
        ),
        (
            "leases_corrected",
            "Leases ended because the engine does not report their requests",
            core.corrected_total,
        ),
    ):
        yield counter(name, meaning, (), [((), float(count))])
    workers = list(state.fleet.workers())
    yield gauge("workers", "Workers that are registered", (), [((), float(len(workers)))])
    refused = float(feeds.refused_messages_total)
    yield counter(
        "feed_refused_messages", "Fleet and load messages that were refused, for any reason", (), [((), refused)]
    )
    gated, ineffective = feeds.gate.refused_total.items(), feeds.events_without_effect.items()
    by_reason = [((str(reason),), float(count)) for reason, count in (*gated, *ineffective)]
    yield counter("fleet_refused", "Fleet events that the router refused", ("reason",), by_reason)
    by_kind = [((kind,), float(count)) for kind, count in feeds.unregistered_messages.items()]
    yield counter(
        "unregistered_messages",
        "Heartbeats of instances, and load reports of ranks, that are not registered",
        ("kind",),
        by_kind,
    )


def trust_families(routing: Routing) -> Iterator[Family]:
    """Yield the trust of each rank, its worker's disparities, and what replaces its events."""
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
        "1 if the field of the worker's registration equals what the router hashes prompts with, else 0",
        ("worker", "field"),
        [
            ((worker_id, field), float(all(each.field != field for each in disparities)))
            for worker_id, disparities in routing.state.fleet.parity(routing.clock.now()).items()
            for field in PARITY_FIELDS
        ],
    )
    begun = routing.calibration.begun_total.items()
    yield counter(
        "predictions_doubted",
        "Times that requests showed a rank to be predicted wrongly: it reuses less than predicted, or what was not",
        ("doubt",),
        [((doubt,), float(count)) for doubt, count in begun],
    )
    core = routing.state.core
    blocks = [((worker_id, str(dp_rank)), float(count)) for (worker_id, dp_rank), count in core.routed_blocks()]
    yield gauge("approximate_blocks", "Blocks in the approximate index, by rank", ("worker", "dp_rank"), blocks)
    totals = core.routed_totals()
    forgotten = [((cause,), float(totals[at])) for at, cause in enumerate(("expired", "evicted", "left"))]
    yield counter(
        "approximate_forgotten_blocks",
        "Blocks that left the approximate index: expired, evicted for room, or their worker left",
        ("cause",),
        forgotten,
    )


def build_families() -> Iterator[Family]:
    """Yield the running version."""
    yield gauge(
        "build_info",
        "1 for the version that this process runs",
        ("version",),
        [((version("kv-router"),), 1.0)],
    )


def policy_families(routing: Routing) -> Iterator[Family]:
    """Yield how the router chooses, and which ranks may be chosen."""
    yield gauge("policy_info", "1 for the mode in force", ("mode",), [((routing.policy.mode,), 1.0)])
    fleet, breakers, now_s = routing.state.fleet, routing.state.breakers, routing.clock.now()
    ranks = [(rank, worker) for worker in fleet.workers() for rank in worker.registration.ranks]
    labelled = [((rank.worker_id, str(rank.dp_rank)), rank, worker) for rank, worker in ranks]
    fit = [
        (at, float(not (fleet.unfit(worker, now_s) or breakers.unfit(rank, now_s)))) for at, rank, worker in labelled
    ]
    yield gauge("rank_fit", "1 while the rank may take new work", ("worker", "dp_rank"), fit)
    states = [
        ((*at, state), float(state == breakers.state(rank, now_s)))
        for at, rank, _ in labelled
        for state in BREAKER_STATES
    ]
    yield gauge(
        "breaker_state", "1 for the present state of the rank's breaker", ("worker", "dp_rank", "state"), states
    )
    statistics = breakers.statistics()
    for name, meaning, count in (
        ("breaker_openings", "Times that a breaker opened", statistics.opened_total),
        ("worker_back_pressure", "Answers 429 and 503 of workers", statistics.back_pressure_total),
    ):
        yield counter(name, meaning, (), [((), float(count))])


def rate_families(state: RouterState) -> Iterator[Family]:
    """Yield what was learnt of the ranks' speed and of the length of answers."""
    factors = [
        ((rank.worker_id, str(rank.dp_rank), work), factor)
        for rank, each in state.rate_factors().items()
        for work, factor in (("prefill", each.prefill), ("decode", each.decode))
    ]
    meaning = "Learnt time of the rank's work, as a multiple of a reference engine's"
    yield gauge("rate_factor", meaning, ("worker", "dp_rank", "work"), factors)
    tokens = [((each.model,), each.output_tokens) for each in state.learnt()]
    yield gauge("expected_output_tokens", "Learnt length of an answer", ("model",), tokens)
    refused = float(state.core.rates_refused_total)
    meaning = "Latencies that were not learnt from because they are impossible"
    yield counter("rates_refused", meaning, (), [((), refused)])


def queue_families(statistics: QueueStatistics) -> Iterator[Family]:
    """Yield the waiting requests."""
    yield gauge("queued_requests", "Requests that wait for room in the fleet", (), [((), float(statistics.requests))])
    yield gauge("queued_tokens", "Uncached tokens of the requests that wait", (), [((), float(statistics.tokens))])
