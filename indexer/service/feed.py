"""Feeds the fold from the log: batches, heartbeats, answers and ticks in, questions out.

    start   read the log after the snapshot that the fold was restored from; without a snapshot, all of it
    ready   once the feed has read all that the log had at the start

Only the feed applies facts, on the event loop, one after another: reads of the fold between two awaits are consistent.
"""

import asyncio
from random import Random
from typing import NamedTuple

import structlog

from indexer.follow.fold import TICK_S, IndexFold
from indexer.follow.inputs import (
    Fact,
    LogConnected,
    Message,
    Question,
    Received,
    WorkerCame,
    WorkerGone,
    read_message,
)
from kv_protocol import fleet, recovery, subjects
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.fleet import WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank, checked_dp_rank, checked_worker_id
from kv_protocol.trace_context import event_trace
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage, LogStreamState, Reading
from kv_runtime.telemetry import RateLimitedLog
from kv_runtime.tracing.service import EventTracing
from kv_runtime.tracing.spans import Attributes, SpanData, TraceData

_NOT_APPLIED = ("never_heard", "refused", "resyncing", "behind")

_SPAN_ID_BITS = 64

_log = structlog.get_logger("indexer")


class LogPosition(NamedTuple):
    """The last message of KV_EVENTS that was applied, and the creation time of its stream."""

    created: str
    stream_seq: int


class IndexFeed:
    """Keeps one fold up to date with one log."""

    def __init__(
        self,
        fold: IndexFold,
        log: EventLog,
        clock: Clock,
        gate: FleetGate,
        *,
        logs_announced: bool = True,
        tracing: EventTracing | None = None,
    ) -> None:
        """Nothing is read before `start`.

        `logs_announced`: write log lines for refused fleet events and heartbeats; False if another reader of this
        process writes them. Without `tracing` no message is traced; messages from before the start never are.
        """
        self._tracing = tracing
        self._random_bits = Random().getrandbits  # noqa: S311 - ids are no secrets
        self._logs_announced = logs_announced
        self._fold, self._event_log, self._clock = fold, log, clock
        self.gate = gate
        self._refusals = RateLimitedLog(_log, clock)
        self._inbox = log.new_inbox()
        self._slug_of: dict[WorkerRank, str] = {}
        self._applied = asyncio.Event()
        self._was_connected = True
        self._logged_refused: set[WorkerRank] = set()
        self._logged_overfull: set[WorkerRank] = set()
        self.refused_messages_total = 0
        """Refused messages, except those of ranks' streams, which the fold counts."""
        self.log_position = LogPosition("", 0)
        """Changes together with the fold, so it is the position of a checkpoint taken now."""
        self._reading: Reading | None = None
        self._target_seq = self._to_read = 0
        self._is_caught_up = False
        self.freshness_s: dict[WorkerRank, float] = {}
        """By rank: the time from the engine's flush of its newest batch until the fold applied, kept or ignored it."""

    async def start(self, stream: LogStreamState, after_seq: int = 0) -> None:
        """Subscribe to answers, heartbeats and fleet events, and to the events in `stream` after `after_seq`.

        Raises:
            BrokerUnavailable: no server, or no streams.
        """
        await self._event_log.listen(f"{self._inbox}.>", self._on_answer)
        await self._event_log.listen(subjects.HEARTBEAT_ALL, self._on_heartbeat)
        await self._event_log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, self._on_fleet_event)
        reading = await self._event_log.follow(
            subjects.EVENTS_STREAM, subjects.EVENTS_ALL, self._on_events, after_seq=after_seq, created=stream.created
        )
        self.log_position = LogPosition(reading.created, reading.delivered_seq)
        self._reading, self._target_seq, self._to_read = reading, stream.last_seq, reading.unread

    def catching_up(self) -> str:
        """Return how many of the log's messages at the start were read; empty once all were.

        Messages that the log dropped meanwhile, by its limits, do not count.
        """
        if self._is_caught_up:
            return ""
        if self._reading is None:
            return "log: not read yet"
        if self.log_position.stream_seq >= self._target_seq or not self._reading.unread:
            self._is_caught_up = True
            return ""
        return f"log: {min(self._reading.delivered_total, self._to_read)} of {self._to_read} messages read"

    async def run(self, stop: asyncio.Event) -> None:
        """Tick until `stop` is set."""
        while not stop.is_set():
            if self._event_log.is_connected != self._was_connected:
                self._was_connected = not self._was_connected
                await self._apply(LogConnected(self._was_connected))
            await self._send_questions(self._fold.tick(self._clock.now()))
            self._log_ranks_without_room()
            self._forget_unknown_ranks()
            await self._clock.wait(stop, TICK_S)

    async def wait_for(self, rank: WorkerRank, epoch: int, seq: int) -> None:
        """Return once the rank's stream was applied up to `seq` of `epoch`; wait for ever if that never happens.

        Events that the agent could not read have no seq, so no caller can wait for them.
        """

        def reached() -> bool:
            view = self._fold.overlap((), (rank,))[0]
            return view.epoch == epoch and view.seq >= seq and view.stale not in _NOT_APPLIED

        while not reached():
            await self._applied.wait()

    def _log_ranks_without_room(self) -> None:
        refused, overfull = self._fold.refused_ranks(), self._fold.overfull_ranks()
        for rank in sorted(refused.keys() - self._logged_refused):
            _log.warning("rank_refused", rank=str(rank), reason=refused[rank])
        for rank in sorted(self._logged_refused - refused.keys()):
            _log.info("rank_not_refused_any_more", rank=str(rank))
        for rank in sorted(overfull - self._logged_overfull):
            _log.warning("rank_overfull", rank=str(rank))
        for rank in sorted(self._logged_overfull - overfull):
            _log.info("rank_not_overfull_any_more", rank=str(rank))
        self._logged_refused, self._logged_overfull = set(refused), overfull

    def _forget_unknown_ranks(self) -> None:
        known = set(self._fold.ranks())
        for by_rank in (self._slug_of, self.freshness_s):
            for rank in by_rank.keys() - known:
                del by_rank[rank]

    async def _on_events(self, message: LogMessage) -> None:
        if self._reading is not None:
            # no other task runs before the message is applied
            self.log_position = LogPosition(self._reading.created, message.stream_seq)
        if (rank := self._rank_of(message)) is None:
            return
        try:
            read = read_message(message.data)
        except MalformedMessage as error:
            self._log_refusal(message, error)
            await self._apply(Received(rank, None))
            return
        came_ns = 0 if self._tracing is None else self._tracing.wall_ns()
        await self._apply(Received(rank, read))
        self._trace(rank, read, came_ns)
        if read.engine_time_ns:
            self.freshness_s[rank] = max(0.0, (self._clock.wall_ns() - read.engine_time_ns) / 1e9)

    def _trace(self, rank: WorkerRank, read: Message, came_ns: int) -> None:
        """Write a span for a message that came at `came_ns`, as a child of the agent's span `kv_events`.

        The trace id and the parent's span id follow from the rank, the epoch and the first seq (`event_trace`). A
        message is not applied while the index waits for an earlier one or for an answer, or follows another epoch.
        """
        tracing, batches = self._tracing, read.span
        if tracing is None or batches is None or self.catching_up():
            return
        ids = event_trace(rank, batches.epoch, batches.first_seq)
        if not tracing.is_sampled(ids.trace_id):
            return
        view = self._fold.overlap((), (rank,))[0]
        is_applied = view.epoch == batches.epoch and view.seq >= batches.last_seq
        attributes: Attributes = {
            "messaging.system": "nats",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": batches.last_seq - batches.first_seq + 1,
            "kvrouter.worker": rank.worker_id,
            "kvrouter.dp_rank": rank.dp_rank,
            "kvrouter.first_seq": batches.first_seq,
            "kvrouter.last_seq": batches.last_seq,
            "kvrouter.outcome": "applied" if is_applied else "not_applied",
        }
        ended_ns, span_id = max(came_ns, tracing.wall_ns()), self._random_bits(_SPAN_ID_BITS) or 1
        span = SpanData("apply", "consumer", span_id, came_ns, ended_ns, attributes)
        tracing.send(TraceData(ids.trace_id, ids.span_id, (span,)))

    async def _on_heartbeat(self, message: LogMessage) -> None:
        if (rank := self._rank_of(message)) is None:
            return
        try:
            heartbeat = fleet.decode_heartbeat(message.data)
        except MalformedMessage as error:
            self.refused_messages_total += 1
            if self._logs_announced:
                self._log_refusal(message, error)
            return
        await self._apply(Received(rank, heartbeat))

    async def _on_answer(self, message: LogMessage) -> None:
        *_, worker_id, dp_rank = message.subject.split(".")
        try:
            answer = recovery.decode_answer(message.data)
            rank = WorkerRank(checked_worker_id(worker_id), checked_dp_rank(int(dp_rank)))
        except (MalformedMessage, LimitExceeded, ValueError) as error:
            self._refuse(message, error)
            return
        await self._apply(Received(rank, answer))

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            event = self.gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused as error:
            self.refused_messages_total += 1
            if self._logs_announced:
                cause, reason = error.reason, str(error)
                self._refusals.warning(
                    "fleet_event_refused", key=cause, subject=message.subject, cause=cause, reason=reason
                )
            return
        if isinstance(event, WorkerRegistered):
            await self._apply(WorkerCame(event.worker_id, event.total_kv_blocks, event.instance))
        elif isinstance(event, WorkerLeft):
            await self._apply(WorkerGone(event.worker_id, event.instance))

    def _rank_of(self, message: LogMessage) -> WorkerRank | None:
        try:
            rank = subjects.rank_of(message.subject)
        except MalformedMessage as error:
            self._refuse(message, error)
            return None
        self._slug_of[rank] = subjects.slug_of(message.subject)
        return rank

    def _refuse(self, message: LogMessage, error: Exception) -> None:
        self.refused_messages_total += 1
        self._log_refusal(message, error)

    def _log_refusal(self, message: LogMessage, error: Exception) -> None:
        self._refusals.warning("message_refused", key=message.subject, subject=message.subject, reason=str(error))

    async def _apply(self, fact: Fact) -> None:
        questions = self._fold.apply(fact, self._clock.now())
        await self._send_questions(questions)
        self._applied.set()  # those that wait go on
        self._applied.clear()

    async def _send_questions(self, questions: list[Question]) -> None:
        for question in questions:
            rank = question.rank
            if (slug := self._slug_of.get(rank)) is None:
                continue  # the rank was forgotten; its next message names its slug again
            _log.info("recovery_asked", rank=str(rank), request_id=question.request.request_id)
            subject = subjects.recover_slug(slug, rank)
            reply = f"{self._inbox}.{rank.worker_id}.{rank.dp_rank}"
            try:
                await self._event_log.announce(subject, recovery.encode(question.request), reply)
            except BrokerUnavailable as error:
                _log.warning("recovery_not_asked", rank=str(rank), reason=str(error))
