"""Queries JetStream about the log: streams, consumers and their lag, storage.

    $JS.API.INFO                      storage, limits.max_storage (-1: none)
    $JS.API.STREAM.INFO.<stream>      config, state, ts: the server's clock as it answers
    $JS.API.CONSUMER.LIST.<stream>    readers, 256 a page; num_pending: messages not sent to the reader yet

Times are RFC 3339, durations nanoseconds, an error is in `error`. Source: docs.nats.io, reference/jetstream/api;
observed with nats-server 2.15.
"""

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import TypeVar

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.event_log.streams import ns_of
from router.doctor.facts import StreamSeen

_API = "$JS.API"
_NO_SUCH_STREAM = 10059
_PAGES_MAX = 16
"""Of 256 readers each; a fleet has one for each index."""
_NS_PER_S = 1e9
_T = TypeVar("_T")


class _Error(msgspec.Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class _Failed(msgspec.Struct, frozen=True):
    error: _Error | None = None


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


class _Stream(msgspec.Struct, frozen=True):
    config: _Config
    state: _State
    ts: str


class _Reader(msgspec.Struct, frozen=True):
    name: str
    num_pending: int


class _Readers(msgspec.Struct, frozen=True):
    total: int
    consumers: list[_Reader] = []


class _Limits(msgspec.Struct, frozen=True):
    max_storage: int


class _Account(msgspec.Struct, frozen=True):
    storage: int
    limits: _Limits


class JetStream:
    """Queries over one connection; `start` must be called first."""

    def __init__(self, log: EventLog, answer_s: float) -> None:
        self._event_log, self._answer_s = log, answer_s
        self._inbox = log.new_inbox()
        self._ids = count(1)
        self._open: dict[str, asyncio.Future[bytes]] = {}

    async def start(self) -> None:
        """Subscribe to answers."""
        await self._event_log.listen(f"{self._inbox}.*", self._on_answer)

    async def store(self) -> tuple[int, int]:
        """Return the bytes that the account's streams take on disk, and their limit; 0: none stated."""
        account = await self._ask("INFO", _Account)
        assert account is not None
        return account.storage, max(0, account.limits.max_storage)

    async def stream(self, name: str) -> StreamSeen | None:
        """Return the present state of a stream; None if it does not exist."""
        found = await self._ask(f"STREAM.INFO.{name}", _Stream)
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
            page = await self._ask(f"CONSUMER.LIST.{stream}", _Readers, msgspec.json.encode({"offset": len(found)}))
            found |= {} if page is None else {each.name: each.num_pending for each in page.consumers}
            if page is None or not page.consumers or len(found) >= page.total:
                break
        return found

    async def _ask(self, what: str, kind: type[_T], body: bytes = b"") -> _T | None:
        """Return the answer; None if there is no such stream; raise `BrokerUnavailable` for any other error."""
        data = await self._answer(what, body)
        try:
            failed = msgspec.json.decode(data, type=_Failed).error
            if failed is None:
                return msgspec.json.decode(data, type=kind)
        except UNDECODABLE as error:
            raise BrokerUnavailable(f"JetStream {what}: {error}") from error
        if failed.err_code == _NO_SUCH_STREAM:
            return None
        raise BrokerUnavailable(f"JetStream {what}: {failed.description}")

    async def _answer(self, what: str, body: bytes) -> bytes:
        request_id = str(next(self._ids))
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[request_id] = answer
        try:
            await self._event_log.announce(f"{_API}.{what}", body, f"{self._inbox}.{request_id}")
            async with asyncio.timeout(self._answer_s):
                data = await answer
        except TimeoutError:
            raise BrokerUnavailable(f"JetStream {what}: no answer within {self._answer_s:g} s") from None
        finally:
            del self._open[request_id]
        if not data:  # the server's sign that there is no listener
            raise BrokerUnavailable(f"JetStream {what}: the server has no JetStream")
        return data

    async def _on_answer(self, message: LogMessage) -> None:
        answer = self._open.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message.data)
