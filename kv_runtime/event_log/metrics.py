"""The statistics of a connection, and their metrics: its owner yields `log_families` at scrape time."""

from collections.abc import Iterator
from typing import NamedTuple

from kv_runtime.telemetry import Family, counter, gauge


class LogStatistics(NamedTuple):
    """One connection to the log."""

    connected: bool
    reconnects_total: int
    unconfirmed: int
    """Publications on their way."""
    publish_failures_total: int
    """Publications that were sent and not confirmed."""
    dropped_total: int
    """Core NATS messages (heartbeats, load reports, answers) that came faster than they were processed."""
    read_anew_total: int
    """Times that a followed stream was another one, or had lost its end."""


def log_families(statistics: LogStatistics) -> Iterator[Family]:
    """Yield the families of one connection; a process has one."""
    yield gauge("log_connected", "1 while the connection to NATS is up", (), [((), statistics.connected)])
    meaning = "Publications of this process that NATS has not confirmed yet; 256 at most"
    yield gauge("log_unconfirmed_messages", meaning, (), [((), statistics.unconfirmed)])
    for name, meaning, count in (
        ("log_reconnects", "Times that the connection to NATS was lost and restored", statistics.reconnects_total),
        ("log_publish_failures", "Publications that NATS did not confirm", statistics.publish_failures_total),
        (
            "log_dropped_messages",
            "Messages dropped because 65,536 of their subscription were waiting",
            statistics.dropped_total,
        ),
        (
            "log_read_anew",
            "Times that a stream was replaced or had lost its end, and was read again from its beginning",
            statistics.read_anew_total,
        ),
    ):
        yield counter(name, meaning, (), [((), count)])
