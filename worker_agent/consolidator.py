"""Hop A to hop B: reads a publisher without holes, folds it into the ranks' mirrors, puts their streams into the log.

Parts of a process (see `kv_runtime.supervise`): live messages, replays, publishing per rank, pulse. It answers for its
ranks: every second with a heartbeat that proves the set, on request with a dump.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog
import zmq
import zmq.asyncio

from kv_protocol import fleet, recovery, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.supervise import Part, until
from worker_agent.core.consolidation import Consolidation
from worker_agent.core.dialects.hop_a import PAYLOAD_BYTES_MAX, REPLAY_END, encode_sequence, split_frames, split_replay
from worker_agent.core.source_cursor import Delivery, SourceCursor

_HWM_MESSAGES = 100_000
_POLL_MS = 100
_DRAIN_S = 1.0
_RETRY_S = 0.1
_RETRY_MAX_S = 2.0

_log = structlog.get_logger("consolidator")


class Consolidator:
    """One publisher's ranks on their way into the log."""

    def __init__(
        self,
        core: Consolidation,
        cursor: SourceCursor,
        log: EventLog,
        context: zmq.asyncio.Context,
        clock: Clock,
        *,
        model: str,
        worker_id: str,
        publish_endpoint: str,
        replay_endpoint: str,
        source_stale: Callable[[], str],
    ) -> None:
        self._core, self._cursor, self._event_log, self._clock = core, cursor, log, clock
        self._model, self._worker_id = model, worker_id
        self._source_stale = source_stale
        self._live = _socket(context, zmq.SUB, publish_endpoint)
        self._replay = _socket(context, zmq.DEALER, replay_endpoint)
        self._told_stale: dict[int, str] = {}
        self._moved = asyncio.Condition()
        self._to_publish = {dp_rank: asyncio.Event() for dp_rank in core.dp_ranks}
        self.refused_messages_total = self.publish_failures_total = self.dumps_total = 0

    @property
    def core(self) -> Consolidation:
        """The state, for its statistics."""
        return self._core

    @property
    def cursor(self) -> SourceCursor:
        """The place on hop A, for its counts."""
        return self._cursor

    def parts(self, first_stage: int) -> list[Part]:
        """Return what is to run, in four stages: live intake stops before the replays it asks for, the pulse last."""
        return [
            Part("hop-a-live", self._read_live, first_stage),
            Part("hop-a-replay", self._read_replay, first_stage + 1),
            *(Part(f"publish-{rank}", partial(self._publish, rank), first_stage + 2) for rank in self._core.dp_ranks),
            Part("pulse", self._pulse, first_stage + 3),
        ]

    async def start(self) -> None:
        """Dumps are answered, and readers know of the new epochs."""
        for dp_rank in self._core.dp_ranks:
            await self._event_log.listen(subjects.recover(self._model, self._rank(dp_rank)), self._answer_dump)
        await self._beat()

    async def position(self, sequence: int) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq), once hop A was read up to before `sequence`."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._cursor.expected >= sequence)
        return {rank: (self._core.outbox(rank).epoch, self._core.outbox(rank).last_seq) for rank in self._core.dp_ranks}

    def _rank(self, dp_rank: int) -> WorkerRank:
        return WorkerRank(self._worker_id, dp_rank)

    async def _read_live(self, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                if await self._live.poll(timeout=_POLL_MS):
                    await self._on_live(await self._live.recv_multipart())
                elif (start := self._cursor.ask_from(self._clock.now())) is not None:
                    await self._ask_replay(start)
            await self._drain_live()
        finally:
            self._live.close()

    async def _drain_live(self) -> None:
        """Read until hop A is quiet: what was published last may still be on its way. A busy source is left behind."""
        end_s = self._clock.now() + _DRAIN_S
        while self._clock.now() < end_s and await self._live.poll(timeout=_POLL_MS):
            await self._on_live(await self._live.recv_multipart())

    async def _on_live(self, frames: list[bytes]) -> None:
        try:
            sequence, payload = split_frames(frames)
        except MalformedMessage as error:
            self._refuse(error)
            return
        await self._deliver(self._cursor.on_live(sequence, payload, self._clock.now()))
        if self._cursor.has_hole and (start := self._cursor.ask_from(self._clock.now())) is not None:
            await self._ask_replay(start)

    async def _ask_replay(self, start: int) -> None:
        await self._replay.send_multipart([b"", encode_sequence(start)])

    async def _read_replay(self, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                if await self._replay.poll(timeout=_POLL_MS):
                    await self._on_replay(await self._replay.recv_multipart())
            await self._drain_replay()
        finally:
            self._replay.close()

    async def _drain_replay(self) -> None:
        end_s = self._clock.now() + _DRAIN_S
        while self._cursor.has_hole and self._clock.now() < end_s and await self._replay.poll(timeout=_POLL_MS):
            await self._on_replay(await self._replay.recv_multipart())

    async def _on_replay(self, frames: list[bytes]) -> None:
        try:
            sequence, payload = split_replay(frames)
        except MalformedMessage as error:
            self._refuse(error)
            return
        if sequence == REPLAY_END:
            await self._deliver(self._cursor.on_replay_end(self._clock.now()))
        else:
            await self._deliver(self._cursor.on_replayed(sequence, payload))

    def _refuse(self, error: MalformedMessage) -> None:
        self.refused_messages_total += 1
        _log.warning("hop_a_message_refused", reason=str(error))

    async def _deliver(self, delivery: Delivery) -> None:
        if delivery.lost:
            _log.error("engine_events_lost", before_sequence=self._cursor.expected)
            self._core.on_loss()
            await self._beat()
        for sequence, payload in delivery.payloads:
            for dp_rank in self._core.on_payload(sequence, payload):
                self._to_publish[dp_rank].set()
        if delivery.payloads:
            async with self._moved:
                self._moved.notify_all()

    async def _publish(self, dp_rank: int, stop: asyncio.Event) -> None:
        changed = self._to_publish[dp_rank]
        while not stop.is_set():
            await until(stop, changed.wait())
            changed.clear()
            await self._drain_outbox(dp_rank, stop)

    async def _drain_outbox(self, dp_rank: int, stop: asyncio.Event) -> None:
        retry_s = _RETRY_S
        rank = self._rank(dp_rank)
        while (message := (outbox := self._core.outbox(dp_rank)).next_message()) is not None:
            try:
                await self._event_log.publish(
                    subjects.events(self._model, rank),
                    message.payload,
                    subjects.message_id(rank, outbox.epoch, message.first_seq),
                )
            except BrokerUnavailable as error:
                self.publish_failures_total += 1
                _log.warning("publish_failed", rank=str(rank), seq=message.first_seq, reason=str(error))
                if stop.is_set():
                    return
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
            else:
                outbox.acknowledge()
                retry_s = _RETRY_S

    async def _pulse(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._beat()
            await until(stop, self._clock.sleep(HEARTBEAT_PERIOD_S))

    async def _beat(self) -> None:
        for dp_rank in self._core.dp_ranks:
            heartbeat = self._core.heartbeat(dp_rank, self._source_stale())
            self._tell_stale(dp_rank, heartbeat.stale)
            pulse = fleet.encode(heartbeat)
            try:
                await self._event_log.announce(subjects.heartbeat(self._model, self._rank(dp_rank)), pulse)
            except BrokerUnavailable as error:
                _log.debug("heartbeat_lost", reason=str(error))

    def _tell_stale(self, dp_rank: int, reason: str) -> None:
        if reason != self._told_stale.get(dp_rank, ""):
            self._told_stale[dp_rank] = reason
            _log.warning("rank_stale" if reason else "rank_current", rank=str(self._rank(dp_rank)), reason=reason)

    async def _answer_dump(self, message: LogMessage) -> None:
        try:
            request = recovery.decode_dump_request(message.data)
            dp_rank = subjects.rank_of(message.subject).dp_rank
        except MalformedMessage as error:
            self._refuse(error)
            return
        self.dumps_total += 1
        try:
            for chunk in self._core.dump(dp_rank, request.request_id):
                await self._event_log.announce(message.reply, recovery.encode(chunk))
        except BrokerUnavailable as error:
            _log.warning("dump_cut_short", rank=message.subject, reason=str(error))


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
    if kind == zmq.SUB:
        socket.set(zmq.RCVHWM, _HWM_MESSAGES)
        socket.subscribe(b"")
    socket.connect(endpoint)
    return socket
