"""A fleet in which nothing is wrong, as the doctor sees it, of which a test changes what it is about."""

from typing import Any

from msgspec.structs import replace

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.subjects import EVENTS_STREAM
from router.doctor.facts import (
    AddressAnswer,
    Bounds,
    FleetFacts,
    LogSeen,
    RankStatus,
    RouterLook,
    RouterSeen,
    StreamHead,
    WorkerSeen,
)
from tests.unit.router.samples import rank, registered

ROUTER, DATA = "http://127.0.0.1:8001", "http://127.0.0.1:8000"
BOUNDS = Bounds(queue_requests_max=100, inflight_requests_max=1000)
METRICS = {
    "kvrouter_index_overfull_ranks": 0.0,
    "kvrouter_index_refused_ranks": 0.0,
    "kvrouter_queued_requests": 0.0,
    "kvrouter_rejected_total": 7.0,
    "kvrouter_rejected_total{queue_full}": 7.0,
}
LOG = LogSeen(fills={EVENTS_STREAM: (1000, 10_000), "the store": (1000, -1)})


def told(worker_id: str, **changed: Any) -> WorkerRegistered:
    """Return a registration at an address of its own."""
    at = f"http://10.0.0.{sum(worker_id.encode()) % 250}:9000"
    fields: dict[str, Any] = {"base_url": at, "event_source": "simulated", "version": "1.0", "block_reuse": True}
    return registered(worker_id, **fields | changed)


def seen(worker: WorkerRegistered, **http: Any) -> WorkerSeen:
    """Return the worker with HTTP that answers, but for what is said."""
    counts = {"kvrouter_outbox_dropped_total": 3.0}
    return WorkerSeen(registration=worker, http=AddressAnswer(url=worker.base_url, **http), before=counts, after=counts)


def head(name: str = "w0/0", **changed: Any) -> StreamHead:
    """Return a rank's heartbeats, three of them."""
    fields: dict[str, Any] = {
        "rank": rank(name), "instance": f"{rank(name).worker_id}-1", "epoch": 1, "first_s": 0.5,
        "last_s": 2.5, "last_seq": 40,
    }  # fmt: skip
    return StreamHead(**fields | changed)


def standing(name: str = "w0/0", trust: str = "EXACT", reason: str = "", unfit: str = "") -> RankStatus:
    """Return how a router has a rank."""
    return RankStatus(rank(name).worker_id, rank(name).dp_rank, trust, reason, unfit)


def router(**changed: Any) -> RouterSeen:
    """Return a router in mode kv that knows w0 and w1."""
    look = RouterLook(ranks=(standing("w0/0"), standing("w1/0")), metrics=METRICS)
    fields: dict[str, Any] = {
        "control": AddressAnswer(url=ROUTER), "mode": "kv", "workers": ("w0", "w1"), "before": look,
        "after": look,
    }  # fmt: skip
    return RouterSeen(**fields | changed)


def facts(*workers: WorkerRegistered, **changed: Any) -> FleetFacts:
    """Return a fleet of these workers (w0 and w1, where there are none) in which nothing is wrong."""
    every = workers or (told("w0"), told("w1"))
    fields: dict[str, Any] = {
        "window_s": 3.0,
        "bounds": BOUNDS,
        "workers": tuple(seen(each) for each in every),
        "heads": tuple(head(str(at), instance=each.instance) for each in every for at in each.ranks),
        "used_blocks": {at: 100 for each in every for at in each.ranks},
        "routers": (router(workers=tuple(each.worker_id for each in every)),),
        "planes": (AddressAnswer(url=DATA),),
        "log": LOG,
    }
    return FleetFacts(**fields | changed)


def with_http(**http: Any) -> FleetFacts:
    """Return the fleet, w0's HTTP as said."""
    return facts(workers=(seen(told("w0"), **http), seen(told("w1"))))


def with_heads(*heads: StreamHead) -> FleetFacts:
    """Return the fleet, w0's heartbeats these."""
    return facts(heads=(*heads, head("w1/0")))


def with_router(**after: Any) -> FleetFacts:
    """Return the fleet, its router changed at the second look."""
    return facts(routers=(router(after=replace(router().after, **after)),))


def with_metric(name: str, value: float) -> FleetFacts:
    """Return the fleet, one of its router's metrics so at the second look."""
    return with_router(metrics={**METRICS, name: value})


def with_log(name: str, used: int, most: int) -> FleetFacts:
    """Return the fleet, so many bytes of its log taken."""
    return facts(log=LogSeen(fills={**LOG.fills, name: (used, most)}))


def lasting(trust: str, reason: str) -> FleetFacts:
    """Return the fleet, w0/0 so at both looks of the router."""
    ranks = (standing("w0/0", trust, reason), standing("w1/0"))
    both = router()
    return facts(
        routers=(replace(both, before=replace(both.before, ranks=ranks), after=replace(both.after, ranks=ranks)),)
    )


def pair(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any) -> FleetFacts:
    """Return a fleet of a prefill and a decode worker."""
    return facts(
        told("w0", **{"role": "prefill", **both, **(prefill or {})}),
        told("w1", **{"role": "decode", **both, **(decode or {})}),
    )
