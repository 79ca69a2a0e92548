"""Metrics at scrape time: the router's state, encoders, the data plane's connections, the endpoint picker."""

from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import chain
from typing import Literal, get_args

import msgspec

from kv_runtime.http.acceptor import ACCEPT_ERRORS
from kv_runtime.telemetry import Family, Sample, by_name, counter, gauge
from kv_runtime.text.encoders import KeptSegments
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.feeds.feeds import RouterFeeds
from router.fleet.breakers import BREAKER_STATES
from router.fleet.trust import PARITY_FIELDS, TRUST_STATES
from router.http.plane import HttpPlane
from router.prompt.prompts import ModelPrompts
from router.queue.waiting import RequestQueue

Outcome = Literal["placed", "answered", "refused", "left"]
"""A worker was named; the picker answered itself; it answered with an error; the gateway gave up before that."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
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
    outcomes = {each: statistics.outcomes[each] for each in OUTCOMES}
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
    """Yield the trust of each rank, what replaces its events, whether it may be chosen, and its learnt speed."""
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
