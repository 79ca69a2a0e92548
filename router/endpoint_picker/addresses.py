"""Finds the workers to which a gateway may send a request, by their endpoints, and others for the same call. Pure.

An endpoint is `ip:port`, for IPv6 `[ip]:port`. Only workers that the gateway can reach, and offers, are eligible. The
gateway gets a list: the chosen worker, then up to `picker.fallbacks` others, cheapest first. It sends the request once:
to no prefill worker, and the stream does not resume on another worker.
"""

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from kv_protocol.fleet import WorkerRegistered
from router.decision.verdict import Verdict

_PORTS = {"http": 80, "https": 443}


def endpoint_of(base_url: str) -> str | None:
    """Return the endpoint of a worker's URL; None if its host is no IP address: a gateway takes no host name.

    Source: `docs/SOURCES.md`, D11.
    """
    url = urlsplit(base_url)
    try:
        address = ipaddress.ip_address(url.hostname or "")
    except ValueError:
        return None
    port = url.port or _PORTS.get(url.scheme, 80)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"  # noqa: PLR2004 - IPv6


class FleetAddresses(NamedTuple):
    """The endpoints of a fleet at one moment."""

    workers: dict[str, str]
    """Worker ids by endpoint."""
    is_complete: bool
    """Whether every worker has an endpoint of its own."""

    def allowed(self, subset: tuple[str, ...] | None) -> frozenset[str] | None:
        """Return the ids of the workers that may be chosen; None: all. Endpoints of no worker are ignored."""
        if subset is None:
            return None if self.is_complete else frozenset(self.workers.values())
        return frozenset(self.workers[each] for each in subset if each in self.workers)


def addresses_of(registrations: Sequence[WorkerRegistered]) -> FleetAddresses:
    """Return the endpoints of these workers; of two with the same endpoint the later one has it."""
    found = ((endpoint_of(each.base_url), each.worker_id) for each in registrations)
    workers = {endpoint: worker_id for endpoint, worker_id in found if endpoint is not None}
    return FleetAddresses(workers, is_complete=len(workers) == len(registrations))


def alternatives(verdict: Verdict, count: int) -> tuple[str, ...]:
    """Return the URLs of at most `count` other workers that take the winner's call as it is, cheapest first.

    They have the winner's role and rank number, take token ids exactly if it does, and a gateway can reach them.
    """
    if not count:
        return ()
    registrations, winner = verdict.model_view.registrations, verdict.place
    like: WorkerRegistered = registrations[winner]
    order = list(range(len(verdict.rank_indices)))
    if verdict.has_costs:
        order.sort(key=verdict.cost_list().__getitem__)
    found = dict[str, None]()
    for at in order:
        place = verdict.rank_indices[at]
        other = registrations[place]
        if other.worker_id == like.worker_id or verdict.ranks[place].dp_rank != verdict.winner.dp_rank:
            continue
        takes_same = other.accepts_token_ids == like.accepts_token_ids and other.role == like.role
        if takes_same and endpoint_of(other.base_url) is not None:
            found[other.base_url] = None
        if len(found) == count:
            break
    return tuple(found)
