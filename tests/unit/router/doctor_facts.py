"""A fleet in which nothing is wrong, as the doctor sees it, of which a test changes what it is about."""

from typing import Any

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.subjects import EVENTS_STREAM
from router.doctor.facts import (
    AddressAnswer,
    Differs,
    FleetFacts,
    RankStatus,
    RouterSeen,
    StreamHead,
    WorkerRow,
    Workers,
    WorkerSeen,
)
from tests.unit.router.samples import rank, registered

ROUTER, DATA = "http://127.0.0.1:8001", "http://127.0.0.1:8000"
FILLS = {EVENTS_STREAM: (1000, 10_000), "the store": (1000, -1)}


def told(worker_id: str, **changed: Any) -> WorkerRegistered:
    """Return a registration at an address of its own."""
    at = f"http://10.0.0.{sum(worker_id.encode()) % 250}:9000"
    fields: dict[str, Any] = {"base_url": at, "event_source": "simulated", "version": "1.0", "block_reuse": True}
    return registered(worker_id, **fields | changed)


def seen(worker: WorkerRegistered, **http: Any) -> WorkerSeen:
    """Return the worker with HTTP that answers, but for what is said."""
    return WorkerSeen(registration=worker, http=AddressAnswer(url=worker.base_url, **http))


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


def listed(*ranks: RankStatus, differs: Differs | None = None) -> Workers:
    """Return what a router lists: the workers of these ranks, in the order of their names, which all differ so."""
    by_worker = {each.worker_id: [one for one in ranks if one.worker_id == each.worker_id] for each in ranks}
    found = [] if differs is None else [differs]
    return Workers([WorkerRow(told(name), own, found) for name, own in sorted(by_worker.items())])


def router(*ranks: RankStatus, **changed: Any) -> RouterSeen:
    """Return a router in mode kv that lists these ranks at both looks; w0/0 and w1/0, where there are none."""
    both = listed(*(ranks or (standing("w0/0"), standing("w1/0"))))
    fields: dict[str, Any] = {"control": AddressAnswer(url=ROUTER), "mode": "kv", "before": both, "after": both}
    return RouterSeen(**fields | changed)


def facts(*workers: WorkerRegistered, **changed: Any) -> FleetFacts:
    """Return a fleet of these workers (w0 and w1, where there are none) in which nothing is wrong."""
    every = workers or (told("w0"), told("w1"))
    fields: dict[str, Any] = {
        "window_s": 3.0,
        "workers": tuple(seen(each) for each in every),
        "heads": tuple(head(str(at), instance=each.instance) for each in every for at in each.ranks),
        "used_blocks": {at: 100 for each in every for at in each.ranks},
        "routers": (router(*(standing(str(at)) for each in every for at in each.ranks)),),
        "planes": (AddressAnswer(url=DATA),),
        "fills": FILLS,
    }
    return FleetFacts(**fields | changed)


def with_http(**http: Any) -> FleetFacts:
    """Return the fleet, w0's HTTP as said."""
    return facts(workers=(seen(told("w0"), **http), seen(told("w1"))))


def with_heads(*heads: StreamHead) -> FleetFacts:
    """Return the fleet, w0's heartbeats these."""
    return facts(heads=(*heads, head("w1/0")))


def with_router(*ranks: RankStatus) -> FleetFacts:
    """Return the fleet, the ranks of its router so at the second look."""
    return facts(routers=(router(after=listed(*ranks)),))


def with_log(name: str, used: int, most: int) -> FleetFacts:
    """Return the fleet, so many bytes of its log taken."""
    return facts(fills={**FILLS, name: (used, most)})


def lasting(trust: str, reason: str) -> FleetFacts:
    """Return the fleet, w0/0 so at both looks of the router."""
    return facts(routers=(router(standing("w0/0", trust, reason), standing("w1/0")),))


def pair(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any) -> FleetFacts:
    """Return a fleet of a prefill and a decode worker."""
    return facts(
        told("w0", **{"role": "prefill", **both, **(prefill or {})}),
        told("w1", **{"role": "decode", **both, **(decode or {})}),
    )
