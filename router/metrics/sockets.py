"""Metrics of the data plane's connections: clients', and those to workers."""

from collections.abc import Iterator

from kv_runtime.http.acceptor import ACCEPT_ERRORS
from kv_runtime.telemetry import Family, counter, gauge
from router.http.plane import HttpStatistics

REFUSED_STATUSES = (400, 401, 403, 408, 413, 415, 417, 421, 431, 501, 503, 505)
"""Statuses with which the data plane refuses a request before routing: malformed, too large, too slow, no key."""


def http_families(statistics: HttpStatistics) -> Iterator[Family]:
    """Yield the present sockets, and totals of former ones."""
    upstream = statistics.upstream
    sockets = {"clients": statistics.connections, "workers": upstream.open, "workers_idle": upstream.idle}
    by_side = [((side,), float(count)) for side, count in sockets.items()]
    yield gauge("http_connections", "Open connections: clients, workers, workers_idle", ("side",), by_side)
    bounds = {"clients": statistics.capacity.clients, "workers": statistics.capacity.workers}
    by_side = [((side,), float(count)) for side, count in bounds.items()]
    yield gauge(
        "http_connections_max",
        "Largest number of connections, as the setting and the limit of open files allow",
        ("side",),
        by_side,
    )
    failures = dict.fromkeys(ACCEPT_ERRORS, 0) | statistics.accept_failures
    by_error = [((error,), float(count)) for error, count in failures.items()]
    yield counter("http_accept_failures", "Connections that could not be accepted, by error", ("error",), by_error)
    refused = dict.fromkeys(REFUSED_STATUSES, 0) | statistics.refused
    by_status = [((str(status),), float(count)) for status, count in refused.items()]
    yield counter(
        "http_refused",
        "Requests refused before routing: malformed, too large, too slow or without a key, by status",
        ("status",),
        by_status,
    )
    read = [((outcome,), float(count)) for outcome, count in statistics.credentials_read.items()]
    meaning = "Changed files of accounts and certificates that were read, by outcome; failed: the former stay in force"
    yield counter("http_credentials_read", meaning, ("outcome",), read)
    for name, meaning, count in (
        ("http_clients_gone", "Clients that left before the end of their answer", statistics.gone),
        ("http_handshakes_failed", "Connections of clients whose TLS handshake failed", statistics.handshakes_failed),
        ("http_client_connections", "Connections that clients opened", statistics.accepted),
        ("http_worker_connections", "Connections that the router opened to workers", upstream.opened),
    ):
        yield counter(name, meaning, (), [((), float(count))])
