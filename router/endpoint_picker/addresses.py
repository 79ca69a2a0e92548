"""The endpoints of workers as gateways know them: `ip:port`, of IPv6 `[ip]:port`. Pure."""

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from kv_protocol.fleet import WorkerRegistered

_PORTS = {"http": 80, "https": 443}


def endpoint_of(base_url: str) -> str | None:
    """Return the endpoint of a worker's URL; None if its host is no IP address: a gateway cannot be told a name.

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


def addresses_of(registrations: Iterable[WorkerRegistered]) -> FleetAddresses:
    """Return the endpoints of these workers; of two with the same endpoint the later one has it."""
    workers, count = dict[str, str](), 0
    for registration in registrations:
        count += 1
        endpoint = endpoint_of(registration.base_url)
        if endpoint is not None:
            workers[endpoint] = registration.worker_id
    return FleetAddresses(workers, is_complete=len(workers) == count)
