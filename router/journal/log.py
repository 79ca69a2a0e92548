"""Writes and reads the journal: applied records go to `kv.v1.journal.<router>`, in order, off the path of requests.

    record          is encoded into a bounded buffer (`encoder.py`); in a full one the oldest are dropped, and counted
    every `PERIOD_S`
                    the buffer is published, message by message; each is tried until it is confirmed
    the log away    unpublished records wait, the buffer fills
    another stream  the stream was replaced, or lost its end: a checkpoint follows
    records lost    the next message states how many (`Lost`), one log line says so, and a checkpoint follows
    checkpoint      due `CHECKPOINT_S` seconds, `CHECKPOINT_RECORDS` records or an eighth of the stream's bytes after
                    the last one, but not before the records between take as many bytes as it did: checkpoints are
                    at most half of the journal. The state is copied at one moment, and made into records later
    stop            the buffer is published, if the log takes it at once

A message that is published again keeps its id, and its records their numbers, so that none counts twice.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from time import perf_counter

import msgspec
import structlog
from pydantic import Field

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import CheckpointBegan, JournalBegan, decode_journal
from kv_runtime.clock import Clock
from kv_runtime.config.sections import NatsSection, Section
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage, OnMessage, StreamSpec
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, by_name, counter, gauge
from router.decision.state import RouterState, StateSettings
from router.journal.encoder import (
    BYTES_MAX,
    LOSS_REASONS,
    EncodedMessage,
    JournalCheckpoint,
    JournalEncoder,
    LossReason,
)
from router.journal.replay import JournalEntry

_LOOK_S = 0.02
_log = structlog.get_logger("router")
PERIOD_S = 1.0
CHECKPOINT_S = 300.0
CHECKPOINT_RECORDS = 200_000
"""A replay begins at a checkpoint: it reads up to this many records before the requested one, in some seconds."""
CHECKPOINT_GAP_S = 5.0
"""Shortest time between two checkpoints that follow losses."""
_CHECKPOINTS_PER_JOURNAL = 8
"""Number of checkpoints that the stream holds at least, if it has only this router's journal."""
_AGAIN_S = 0.5


async def read_journal(
    log: EventLog,
    router: str,
    take: Callable[[JournalEntry], None],
    stop: asyncio.Event,
    *,
    after_seq: int = 0,
    from_ns: int | None = None,
    follow: bool = False,
) -> None:
    """Pass the readable messages of the router's journal to `take`; an empty `router` stands for all routers.

    The other parameters are as in `read_stream`. A log line names the first unreadable message, and another one at the
    end says how many there were.
    """
    refused = 0

    async def on_message(message: LogMessage) -> None:
        nonlocal refused
        name = message.subject.rpartition(".")[2]
        try:
            entry = JournalEntry(name, message.stream_seq, message.time_ns, decode_journal(message.data))
        except MalformedMessage as error:
            refused += 1
            if refused == 1:
                reason = str(error)
                _log.warning("message_refused", subject=message.subject, seq=message.stream_seq, reason=reason)
        else:
            take(entry)

    stream, subject = subjects.JOURNAL_STREAM, subjects.journal(router) if router else subjects.JOURNAL_ALL
    try:
        await read_stream(log, stream, subject, on_message, stop, after_seq=after_seq, from_ns=from_ns, follow=follow)
    finally:
        if refused > 1:
            _log.warning("journal_messages_refused", messages=refused)


async def read_stream(
    log: EventLog,
    stream: str,
    subject: str,
    on_message: OnMessage,
    stop: asyncio.Event,
    *,
    after_seq: int = 0,
    from_ns: int | None = None,
    follow: bool = False,
) -> None:
    """Pass the messages after `after_seq` that the stream has now to `on_message`; with `follow` later ones, too.

    `from_ns`: none before that time (ns since 1970). Return after the last message, or at `stop`. `log.run` has to run.
    """
    state = await log.stream_state(stream)
    end = math.inf if follow else state.last_seq
    if from_ns is not None:
        after_seq = max(after_seq, await log.seq_at(stream, from_ns - 1))

    async def take_until_end(message: LogMessage) -> None:
        if message.stream_seq <= end:
            await on_message(message)

    after_seq = min(after_seq, state.last_seq)
    reading = await log.follow(stream, subject, take_until_end, after_seq=after_seq, created=state.created)
    while (follow or (reading.unread and reading.delivered_seq < end)) and not stop.is_set():  # noqa: ASYNC110 - no event
        await asyncio.sleep(_LOOK_S)
    await log.leave(reading)


class JournalSection(Section):
    """The journal on the log, and the decisions kept for people."""

    decisions_max: int = Field(1000, ge=1, le=1_000_000, description="newest decisions that can be explained; memory")
    enabled: bool = Field(default=True, description="write the journal: without it no decision can be replayed")
    router: str = Field("", pattern=r"^[a-z0-9-]{0,64}$", description="this router's name there; empty: made at start")
    max_age_s: float = Field(
        86_400.0, ge=1, le=30 * 86_400, description="how long KV_JOURNAL keeps messages; longer costs disk"
    )
    max_bytes: int = Field(
        512 << 20, ge=1 << 20, le=1 << 40, description="most bytes of disk that KV_JOURNAL takes for all routers"
    )


def router_name(settings: JournalSection, instance: str) -> str:
    """Return the router's name in the log: the configured one, or one made of its process's random id (hex)."""
    return settings.router or f"router-{instance[:8]}"


async def ensure_journal(log: EventLog, settings: JournalSection, nats: NatsSection) -> None:
    """Ensure that the journal's stream exists, with the configured bounds.

    Raises:
        StreamUnfit: a stream of that name was made for another use.
        BrokerUnavailable: the server refuses it, or is unreachable.
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


class JournalWriter:
    """Writes one run of a router into the log; a part of a process."""

    def __init__(
        self,
        log: EventLog,
        clock: Clock,
        settings: JournalSection,
        *,
        router: str,
        made_of: StateSettings,
        state: RouterState,
        kv_seq: Callable[[], int],
        buffer_bytes_max: int = BYTES_MAX,
        checkpoint_records: int = CHECKPOINT_RECORDS,
    ) -> None:
        """Begin a run: the first record states an empty state made of `made_of`.

        `state` is that state, to which every record is applied before it comes to `encoder.record`. `kv_seq` returns
        how far the index has read `KV_EVENTS`.
        """
        self.router = router
        self._event_log, self._clock = log, clock
        self._state, self._made_of, self._settings = state, msgspec.to_builtins(made_of), settings
        self._checkpoint_records = checkpoint_records
        self._subject = subjects.journal(router)
        self._life = clock.wall_ns()
        self.encoder = JournalEncoder(self._life, kv_seq, buffer_bytes_max, clock.now(), self._on_full)
        self._unsent: EncodedMessage | None = None
        self._is_failing = False
        self._last_seq = 0
        """The number that the stream gave to our last message."""
        self._is_past_gone = False
        """Whether the stream has lost messages of ours that a replay needs."""
        self.records_total = self.messages_total = self.bytes_total = self.failures_total = 0
        """Records, messages and bytes that the log has confirmed, and how often it did not confirm a message."""
        self._checkpoint_taken_s = -math.inf
        self.checkpoint_pause_s = 0.0
        """For how long copying the state for the last checkpoint blocked the process."""
        began = JournalBegan(now_s=clock.now(), router=router, started_ns=self._life, settings=self._made_of)
        self.encoder.record(began)

    def _on_full(self, waiting_bytes: int) -> None:
        _log.warning("journal_buffer_full", bytes=waiting_bytes)

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until `stop` is set, and then the rest, if the log takes it at once."""
        await until(stop, self._write())
        while (self.waiting() or self.encoder.is_in_checkpoint) and await self._publish_next():
            pass
        if left := self.waiting():
            self.encoder.lost["log_away"] += left
            _log.warning("journal_cut_short", records=left)

    async def _write(self) -> None:
        """Publish forever. After a cancellation the present message may be published again: it keeps its id."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._event_log.is_connected:
                self.encoder.journal.complete()
            while self._event_log.is_connected and (
                self._unsent or self.encoder.has_message or self._is_checkpoint_due()
            ):
                if self._is_checkpoint_due():
                    self._take_checkpoint()
                if not await self._publish_next():
                    await self._clock.sleep(_AGAIN_S)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _is_checkpoint_due(self) -> bool:
        if self.encoder.is_in_checkpoint:
            return False
        now_s, encoder = self._clock.now(), self.encoder
        if encoder.broken_by or self._is_past_gone:
            return now_s - self._checkpoint_taken_s >= CHECKPOINT_GAP_S
        since_s, records, bytes_ = encoder.checkpoint_at
        grown_bytes = encoder.bytes_total - bytes_
        if grown_bytes < encoder.checkpoint_bytes:
            return False
        return (
            now_s - since_s >= CHECKPOINT_S
            or encoder.records_total - records >= self._checkpoint_records
            or grown_bytes >= self._settings.max_bytes // _CHECKPOINTS_PER_JOURNAL
        )

    def _take_checkpoint(self) -> None:
        """Copy the state: it includes all records so far, and nothing else."""
        began_s, now_s = perf_counter(), self._clock.now()
        if lost := self.encoder.broken_by:
            _log.warning("journal_records_lost", records=lost.total(), reasons=dict(lost))
        began = CheckpointBegan(now_s=now_s, router=self.router, settings=self._made_of)
        self.encoder.record(JournalCheckpoint(self._state, began))
        self._checkpoint_taken_s = now_s
        self._is_past_gone = False
        self.checkpoint_pause_s = perf_counter() - began_s

    # ------------------------------------------------------------------------------------------------- messages

    async def _publish_next(self) -> bool:
        """Publish one message; return whether the log has it."""
        while (message := self._unsent) is None:
            self._unsent = self.encoder.step(self._clock.now())
            await asyncio.sleep(0)
        message_id = f"{self.router}/{self._life}/{message.first}"
        try:
            seq = await self._event_log.publish(self._subject, message.data, message_id)
        except BrokerUnavailable as error:
            self.failures_total += 1
            if not self._is_failing:
                _log.warning("journal_not_written", reason=str(error))
            self._is_failing = True
            return False
        self._unsent, self._is_failing = None, False
        if seq <= self._last_seq:
            _log.warning("journal_begins_anew", last_seq=self._last_seq, seq=seq)
            self._is_past_gone = True
        self._last_seq = seq
        self.records_total += message.records
        self.messages_total += 1
        self.bytes_total += len(message.data)
        return True

    def waiting(self) -> int:
        """Return how many records the log has not confirmed."""
        return len(self.encoder) + (self._unsent.records if self._unsent else 0)

    def problem(self) -> str:
        """Return why records wait; empty if the log takes them."""
        if not self._is_failing:
            return ""
        return f"the journal is not written: {self.waiting()} records wait for the event log (its disk may be full)"

    def lost(self) -> dict[LossReason, int]:
        """Return how many records were lost, by reason."""
        return {reason: self.encoder.lost[reason] for reason in LOSS_REASONS}

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        encoder, lost = self.encoder, by_name((), self.lost())
        yield counter("journal_lost_records", "Records that the journal lost, by reason", ("reason",), lost)
        for kind, name, meaning, value in (
            (counter, "records", "Journal records that the log has confirmed", self.records_total),
            (counter, "batches", "Journal messages that the log has confirmed", self.messages_total),
            (counter, "bytes", "Journal bytes that the log has confirmed", self.bytes_total),
            (counter, "publish_failures", "Journal messages that the log did not confirm", self.failures_total),
            (counter, "checkpoints", "Complete checkpoints; a replay can start at each", encoder.checkpoints_total),
            (gauge, "unpublished_records", "Journal records that the log has not confirmed yet", self.waiting()),
            (gauge, "checkpoint_bytes", "Size of the last complete checkpoint", encoder.checkpoint_bytes),
            (gauge, "checkpoint_pause_seconds", "Time for which the last checkpoint blocked requests",
             self.checkpoint_pause_s),
        ):  # fmt: skip
            yield kind(f"journal_{name}", meaning, rows=[((), value)])
