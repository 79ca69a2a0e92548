"""Queries JetStream about the log: streams, consumers and their lag, storage.

    $JS.API.INFO                      storage, limits.max_storage (-1: none)
    $JS.API.STREAM.INFO.<stream>      config, state, ts: the server's clock as it answers
    $JS.API.CONSUMER.LIST.<stream>    readers, 256 a page; num_pending: messages not sent to the reader yet

Times are RFC 3339, durations nanoseconds. Source: docs.nats.io, reference/jetstream/api;
observed with nats-server 2.15.
"""

from collections.abc import Mapping

import msgspec

from kv_runtime.event_log import EventLog
from kv_runtime.event_log.streams import ns_of
from router.doctor.facts import StreamSeen

_PAGES_MAX = 16
"""Of 256 readers each; a fleet has one for each index."""
_NS_PER_S = 1e9


class _Config(msgspec.Struct, frozen=True):
    max_bytes: int
    max_age: int
    storage: str
    num_replicas: int


class _State(msgspec.Struct, frozen=True):
    messages: int
    bytes: int
    first_ts: str
    last_ts: str


class _StreamInfo(msgspec.Struct, frozen=True):
    config: _Config
    state: _State
    ts: str


class _Consumer(msgspec.Struct, frozen=True):
    name: str
    num_pending: int


class _Consumers(msgspec.Struct, frozen=True):
    total: int
    consumers: list[_Consumer] = []


class _Limits(msgspec.Struct, frozen=True):
    max_storage: int


class _Account(msgspec.Struct, frozen=True):
    storage: int
    limits: _Limits


class JetStream:
    """Queries over one connection; each raises `BrokerUnavailable` without an answer."""

    def __init__(self, log: EventLog) -> None:
        self._event_log = log

    async def store(self) -> tuple[int, int]:
        """Return the bytes that the account's streams take on disk, and their limit; 0: none stated."""
        account = await self._event_log.answer_of("INFO", _Account)
        assert account is not None
        return account.storage, max(0, account.limits.max_storage)

    async def stream(self, name: str) -> StreamSeen | None:
        """Return the present state of a stream; None if it does not exist."""
        found = await self._event_log.answer_of(f"STREAM.INFO.{name}", _StreamInfo)
        if found is None:
            return None
        now_ns, state = ns_of(found.ts), found.state
        oldest_s, newest_s = (
            (now_ns - ns_of(time)) / _NS_PER_S if state.messages else 0.0 for time in (state.first_ts, state.last_ts)
        )
        return StreamSeen(
            bytes=state.bytes,
            bytes_max=max(0, found.config.max_bytes),
            oldest_s=oldest_s,
            newest_s=newest_s,
            age_max_s=found.config.max_age / _NS_PER_S,
            replicas=found.config.num_replicas,
            storage=found.config.storage,
            messages=state.messages,
        )

    async def pending(self, stream: str) -> Mapping[str, int]:
        """Return how many messages were not sent to each reader of a stream yet; empty without the stream."""
        found: dict[str, int] = {}
        for _ in range(_PAGES_MAX):
            page = await self._event_log.answer_of(
                f"CONSUMER.LIST.{stream}", _Consumers, msgspec.json.encode({"offset": len(found)})
            )
            found |= {} if page is None else {each.name: each.num_pending for each in page.consumers}
            if page is None or not page.consumers or len(found) >= page.total:
                break
        return found
