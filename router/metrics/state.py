"""Metrics of the router's state at scrape time: promised work, trust, parity, approximate ranks."""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import chain

from kv_runtime.telemetry import Family, Sample, by_name, counter, gauge
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.feeds.feeds import RouterFeeds
from router.fleet.breakers import BREAKER_STATES
from router.fleet.trust import PARITY_FIELDS, TRUST_STATES
from router.queue.admission import RequestQueue

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


def state_families(state: RouterState, feeds: RouterFeeds) -> Iterator[Family]:
    """Yield the figures of the present state."""
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
        (
            "feed_refused_messages",
            "Fleet and load messages that were refused, for any reason",
            feeds.refused_messages_total,
        ),
    ):
        yield counter(name, meaning, rows=[((), count)])
    refused = [*by_name((), feeds.gate.refused_total), *by_name((), feeds.events_without_effect)]
    yield counter("fleet_refused", "Fleet events that the router refused", ("reason",), refused)
    meaning = "Heartbeats of instances, and load reports of ranks, that are not registered"
    yield counter("unregistered_messages", meaning, ("kind",), by_name((), feeds.unregistered_messages))


def trust_families(routing: Routing) -> Iterator[Family]:
    """Yield the trust of each rank, its worker's disparities, and what replaces its events."""
    trusts = [_one_of(_at(rank), trust.state, TRUST_STATES) for rank, trust in routing.trust().items()]
    yield gauge("rank_trust", "1 for the rank's present trust state", (*_RANK, "trust"), chain(*trusts))
    yield gauge(
        "worker_parity",
        "1 if the field of the worker's registration equals what the router hashes prompts with, else 0",
        ("worker", "field"),
        [
            ((worker_id, field), all(each.field != field for each in disparities))
            for worker_id, disparities in routing.state.fleet.parity(routing.clock.now()).items()
            for field in PARITY_FIELDS
        ],
    )
    meaning = (
        "Times that requests showed a rank to be predicted wrongly: it reuses less than predicted, or what was not"
    )
    yield counter("predictions_doubted", meaning, ("doubt",), by_name((), routing.calibration.begun_total))
    core = routing.state.core
    blocks = [(_at(rank), count) for rank, count in core.routed_blocks()]
    yield gauge("approximate_blocks", "Blocks in the approximate index, by rank", _RANK, blocks)
    forgotten = dict(zip(("expired", "evicted", "left"), core.routed_totals(), strict=False))
    meaning = "Blocks that left the approximate index: expired, evicted for room, or their worker left"
    yield counter("approximate_forgotten_blocks", meaning, ("cause",), by_name((), forgotten))


def _at(rank: tuple[str, int]) -> tuple[str, str]:
    return rank[0], str(rank[1])


def _one_of(at: tuple[str, ...], present: str, states: Iterable[str]) -> list[Sample]:
    return by_name(at, {state: state == present for state in states})


def build_families() -> Iterator[Family]:
    """Yield the running version."""
    yield gauge("build_info", "1 for the version that this process runs", ("version",), [((version("kv-router"),), 1)])


def policy_families(routing: Routing) -> Iterator[Family]:
    """Yield how the router chooses, and which ranks may be chosen."""
    yield gauge("policy_info", "1 for the mode in force", ("mode",), [((routing.policy.mode,), 1)])
    fleet, breakers, now_s = routing.state.fleet, routing.state.breakers, routing.clock.now()
    ranks = [(rank, worker) for worker in fleet.workers() for rank in worker.registration.ranks]
    fit = [(_at(rank), not (fleet.unfit(worker, now_s) or breakers.unfit(rank, now_s))) for rank, worker in ranks]
    yield gauge("rank_fit", "1 while the rank may take new work", _RANK, fit)
    states = chain(*(_one_of(_at(rank), breakers.state(rank, now_s), BREAKER_STATES) for rank, _ in ranks))
    yield gauge("breaker_state", "1 for the present state of the rank's breaker", (*_RANK, "state"), states)
    statistics = breakers.statistics()
    for name, meaning, count in (
        ("breaker_openings", "Times that a breaker opened", statistics.opened_total),
        ("worker_back_pressure", "Answers 429 and 503 of workers", statistics.back_pressure_total),
    ):
        yield counter(name, meaning, rows=[((), count)])


def rate_families(state: RouterState) -> Iterator[Family]:
    """Yield what was learnt of the ranks' speed and of the length of answers."""
    factors = state.rate_factors().items()
    found = chain(*(by_name(_at(rank), {"prefill": each.prefill, "decode": each.decode}) for rank, each in factors))
    meaning = "Learnt time of the rank's work, as a multiple of a reference engine's"
    yield gauge("rate_factor", meaning, (*_RANK, "work"), found)
    tokens = [((each.model,), each.output_tokens) for each in state.learnt()]
    yield gauge("expected_output_tokens", "Learnt length of an answer", ("model",), tokens)
    meaning = "Latencies that were not learnt from because they are impossible"
    yield counter("rates_refused", meaning, rows=[((), state.core.rates_refused_total)])


def queue_families(queue: RequestQueue) -> Iterator[Family]:
    """Yield the waiting requests."""
    yield gauge("queued_requests", "Requests that wait for room in the fleet", rows=[((), len(queue))])
    yield gauge("queued_tokens", "Uncached tokens of the requests that wait", rows=[((), queue.tokens)])
