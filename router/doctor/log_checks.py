"""Checks whether the log keeps the required messages, and whether its readers keep up.

log.unreachable   the log did not answer
log.no_stream     `KV_EVENTS` or `KV_FLEET` does not exist
log.full          `KV_EVENTS` takes more than `FULL_RATIO` of its bytes: snapshots should have allowed a purge
log.uncovered     its oldest message is near its maximum age, and no snapshot is younger than half of that
log.storage       a stream is kept in memory
log.store         the server's store for the account is nearly full
log.lag           a reader of `KV_EVENTS` is far behind, and does not catch up
log.replicas      a stream is on one server only
"""

from collections.abc import Iterator

from kv_protocol.subjects import EVENTS_STREAM, SNAPSHOT_BUCKET
from router.doctor.facts import FleetFacts, LogSeen
from router.doctor.findings import Finding, names

SNAPSHOT_STREAM = f"OBJ_{SNAPSHOT_BUCKET}"
"""Source: the layout of NATS object stores (ADR-20): a bucket's stream is `OBJ_<bucket>`."""
FULL_RATIO = 0.9
"""Above the three quarters at which a snapshot's messages are purged: there was no snapshot for that."""
OLD_RATIO = 0.9
"""Of the maximum age: the oldest messages are removed next."""
COVERED_RATIO = 0.5
"""A snapshot is written four times within the age; one that is older than half of it is overdue."""
STORE_RATIO = 0.9
"""A stream without storage accepts nothing more, whatever its own bounds."""
LAG_MESSAGES = 10_000
"""A router reads this many in well under a second; a reader that keeps up has a few."""


def log(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the problems of the log."""
    seen = facts.log
    if seen.problem:
        yield Finding("log.unreachable", "the log", seen.problem)
        return
    for name in seen.missing:
        yield Finding("log.no_stream", name, "there is no such stream")
    yield from _sizes(seen)
    yield from _settings(seen)
    for reader, pending in seen.pending_after.items():
        before = seen.pending_before.get(reader, 0)
        if before >= LAG_MESSAGES and pending >= before:
            words = f"{before} messages of {EVENTS_STREAM} not read, {facts.window_s:.1f} s later {pending}"
            yield Finding("log.lag", f"reader {reader}", words)


def _sizes(seen: LogSeen) -> Iterator[Finding]:
    if seen.store_bytes_max > 0 and seen.store_bytes >= STORE_RATIO * seen.store_bytes_max:
        yield Finding("log.store", "the log", f"{seen.store_bytes} of {seen.store_bytes_max} bytes are taken")
    events = seen.streams.get(EVENTS_STREAM)
    if events is None:
        return
    if events.bytes_max > 0 and events.bytes >= FULL_RATIO * events.bytes_max:
        yield Finding("log.full", EVENTS_STREAM, f"{events.bytes} of {events.bytes_max} bytes are taken")
    if not events.age_max_s or events.oldest_s < OLD_RATIO * events.age_max_s:
        return
    snapshots = seen.streams.get(SNAPSHOT_STREAM)
    if snapshots is None or not snapshots.messages:
        words = "and there is no snapshot"
    elif snapshots.newest_s > COVERED_RATIO * events.age_max_s:
        words = f"and the newest snapshot is {snapshots.newest_s:.0f} s old"
    else:
        return
    bounds = f"the oldest message is {events.oldest_s:.0f} s old, at {events.age_max_s:.0f} s it goes"
    yield Finding("log.uncovered", EVENTS_STREAM, f"{bounds}, {words}")


def _settings(seen: LogSeen) -> Iterator[Finding]:
    for name, stream in seen.streams.items():
        if stream.storage != "file":
            yield Finding("log.storage", name, f"storage {stream.storage}")
    unreplicated = sorted(name for name, stream in seen.streams.items() if stream.replicas == 1)
    if unreplicated:
        yield Finding("log.replicas", names(unreplicated), "replicas 1")
