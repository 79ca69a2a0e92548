"""Metrics of the data plane's connections: clients', and those to workers."""

from collections.abc import Iterator

from kv_runtime.http.acceptor import ACCEPT_ERRORS
from kv_runtime.telemetry import Family, by_name, counter, gauge
from router.http.plane import HttpPlane

REFUSED_STATUSES = (400, 401, 403, 408, 413, 415, 417, 421, 431, 501, 503, 505)
"""Statuses with which the data plane refuses a request before routing: malformed, too large, too slow, no key."""


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
