"""The journal's writer: what was applied goes to `kv.v1.journal.<router>`, in its order, off the requests' path.

    record          a bounded buffer takes it; when it is full the oldest gives way, and is counted
    `PERIOD_S` after the first, or when a quarter of the buffer is full
                    what is there is made small, encoded and published, a message at a time, each until it is confirmed
    the log away    what was not published waits, the buffer fills
    next message    begins with `Lost`, where any gave way since the last
    stop            what is there is published, if the log takes it at once

A message that is published again has the id of before, and its records their numbers, so that none counts twice.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec
import structlog

from kv_protocol import subjects
from kv_protocol.journal import MESSAGE_BYTES_MAX, JournalBegan, JournalRecord, Lost, encode_record, pack_journal
from kv_runtime.clock import Clock
from kv_runtime.config import NatsSection
from kv_runtime.event_log import BrokerUnavailable, EventLog, StreamSpec
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, counter, gauge
from router.config import JournalSection
from router.core.recording import Recordable, Shortener
from router.core.state_settings import StateSettings

PERIOD_S = 0.05
_SLICE = 64
"""Inputs that are encoded at a time; others have the process between two slices."""
_AGAIN_S = 0.5
_RECORD_BYTES_MAX = MESSAGE_BYTES_MAX - 64
"""Room for records in a message, and so for one."""

_log = structlog.get_logger("router")


def router_name(settings: JournalSection, instance: str) -> str:
    """Return the router's name on the log: the configured one, or one made of its process's random id (hex)."""
    return settings.router or f"router-{instance[:8]}"


async def ensure_journal(log: EventLog, settings: JournalSection, nats: NatsSection) -> None:
    """The journal's stream exists, with the configured bounds.

    Raises:
        StreamUnfit: one is there that cannot be ours.
        BrokerUnavailable: the server refuses it, or is away.
    """
    await log.ensure_stream(
        StreamSpec(
            subjects.JOURNAL_STREAM,
            (subjects.JOURNAL_ALL,),
            settings.max_age_s,
            settings.max_bytes,
            replicas=nats.replicas,
        )
    )


def _encoded(record: JournalRecord) -> bytes:
    """Return the record's bytes; none where it holds what the form has no room for: no record may end the process."""
    try:
        return encode_record(record)
    except (OverflowError, TypeError, ValueError) as error:
        _log.error("record_not_written", kind=type(record).__name__, reason=str(error))
        return b""


class JournalStatistics(NamedTuple):
    """Records, messages and bytes that the log has; records that it will never have; inputs that wait."""

    records_total: int
    messages_total: int
    bytes_total: int
    lost_total: int
    failures_total: int
    waiting: int


class _Message(NamedTuple):
    """A message, the number of its first record, and how many inputs' worth of records it has."""

    data: bytes
    first: int
    records: int


class JournalWriter:
    """One router's life in the log; a part of a process."""

    def __init__(
        self,
        log: EventLog,
        clock: Clock,
        settings: JournalSection,
        *,
        router: str,
        state: StateSettings,
        kv_seq: Callable[[], int],
    ) -> None:
        """The first record waits: this life began, with an empty state made of `state`.

        `kv_seq` says how far the index has read `KV_EVENTS`.
        """
        self.router = router
        self._event_log, self._clock, self._kv_seq = log, clock, kv_seq
        self._subject = subjects.journal(router)
        self._life = clock.wall_ns()
        self._records_max = settings.buffer_records_max
        self._early = settings.buffer_records_max // 4
        self._buffer: deque[Recordable] = deque(maxlen=self._records_max)
        self._kv_seqs: deque[int] = deque(maxlen=self._records_max)  # of each of the buffer; pairs would be garbage
        self._begun, self._due = asyncio.Event(), asyncio.Event()
        self._pushed_out = 0
        self._shortener = Shortener()
        self._encoded: deque[tuple[bytes, int]] = deque()
        self._encoded_bytes = 0
        self._next = 1
        self._unsent: _Message | None = None
        self._is_failing = False
        self._records = self._messages = self._bytes = self._lost = self._failures = 0
        self.record(
            JournalBegan(now_s=clock.now(), router=router, started_ns=self._life, settings=msgspec.to_builtins(state))
        )

    def record(self, what: Recordable) -> None:
        """`what` was applied: it will be in the log, unless it has to give way."""
        waiting = len(self._buffer)
        if not waiting:
            self._begun.set()
        elif waiting >= self._early:
            self._due.set()
            self._pushed_out += waiting == self._records_max
        self._buffer.append(what)
        self._kv_seqs.append(self._kv_seq())

    @property
    def _has_any(self) -> bool:
        return bool(self._buffer or self._encoded or self._unsent)

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until `stop` is set, and then what is left, as far as the log takes it at once."""
        await until(stop, self._write())
        while self._has_any and await self._publish_next():
            pass
        if left := self._waiting():
            self._lost += left
            _log.warning("journal_cut_short", records=left)

    async def _write(self) -> None:
        """Publish for ever. Whoever cancels it may publish what was under way once more: it has its id."""
        while True:
            if not self._has_any:
                await self._begun.wait()
            self._begun.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._due.wait()
            self._due.clear()
            while self._has_any and self._event_log.is_connected:
                if not await self._publish_next():
                    await self._clock.sleep(_AGAIN_S)

    async def _publish_next(self) -> bool:
        """Publish one message; return whether the log has it."""
        if self._unsent is None:
            await self._encode()
            self._unsent = self._cut()
        message = self._unsent
        message_id = f"{self.router}/{self._life}/{message.first}"
        try:
            await self._event_log.publish(self._subject, message.data, message_id)
        except BrokerUnavailable as error:
            self._failures += 1
            if not self._is_failing:
                _log.warning("journal_not_written", reason=str(error))
            self._is_failing = True
            return False
        self._unsent, self._is_failing = None, False
        self._records += message.records
        self._messages += 1
        self._bytes += len(message.data)
        return True

    async def _encode(self) -> None:
        """Encode what waits, or as much of it as a message takes."""
        while self._buffer and self._encoded_bytes < MESSAGE_BYTES_MAX:
            self._encode_some(min(_SLICE, len(self._buffer)))
            await asyncio.sleep(0)

    def _encode_some(self, count: int) -> None:
        """Encode the oldest of what waits."""
        if self._pushed_out:
            self._add_lost(self._pushed_out)
            self._pushed_out = 0
        inputs, kv_seqs, keep = self._buffer.popleft, self._kv_seqs.popleft, self._encoded.append
        encoded_bytes = 0
        for _ in range(count):
            for record in self._shortener.records(inputs(), kv_seqs()):
                encoded = _encoded(record)
                if 0 < len(encoded) <= _RECORD_BYTES_MAX:
                    keep((encoded, 1))
                    encoded_bytes += len(encoded)
                else:
                    self._add_lost(1)
        self._encoded_bytes += encoded_bytes

    def _add_lost(self, count: int) -> None:
        encoded = encode_record(Lost(now_s=self._clock.now(), count=count))
        self._encoded.append((encoded, count))
        self._encoded_bytes += len(encoded)
        self._lost += count

    def _cut(self) -> _Message:
        """Return a message of the oldest encoded records, as many as fit."""
        records, size, first = list[bytes](), 0, self._next
        while self._encoded and size + len(self._encoded[0][0]) <= _RECORD_BYTES_MAX:
            encoded, weight = self._encoded.popleft()
            records.append(encoded)
            size += len(encoded)
            self._next += weight
        self._encoded_bytes -= size
        return _Message(pack_journal(self._life, first, records), first, len(records))

    def _waiting(self) -> int:
        return len(self._buffer) + len(self._encoded) + (self._unsent.records if self._unsent else 0)

    def statistics(self) -> JournalStatistics:
        """Return the writer's figures."""
        return JournalStatistics(
            records_total=self._records,
            messages_total=self._messages,
            bytes_total=self._bytes,
            lost_total=self._lost + self._pushed_out,
            failures_total=self._failures,
            waiting=self._waiting(),
        )


def journal_families(found: JournalStatistics) -> Iterator[Family]:
    """Yield the figures of a writer."""
    for name, meaning, value in (
        ("journal_records", "Records of the journal that the log has", found.records_total),
        ("journal_batches", "Messages of the journal that the log has", found.messages_total),
        ("journal_bytes", "Bytes of the journal that the log has", found.bytes_total),
        ("journal_lost_records", "Records that the journal will never have", found.lost_total),
        ("journal_publish_failures", "Messages of the journal that the log did not confirm", found.failures_total),
    ):
        yield counter(name, meaning, (), [((), float(value))])
    yield gauge("journal_unpublished_records", "Records that wait for the log", (), [((), float(found.waiting))])
