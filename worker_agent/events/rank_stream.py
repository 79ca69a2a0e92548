"""Sends one rank's outbox to the log: in order, several messages unacknowledged.

    the log confirms       the message is acknowledged in the outbox; the next one may be sent
    the log refuses, or    every unacknowledged message is published again after 0.1 s (doubled up to 2 s), with
      is unreachable         the same ids: the log drops duplicates. One message is sent first; once the log confirms
                             it, the others follow

While the server is away, slow, full or without the stream, the outbox may drop batches. The failure is logged once.

A share of a rank's messages is traced, from the engine to the log, with these spans:

    kv_events            INTERNAL   from the engine's flush of the first batch until the log has the message
      consolidate        INTERNAL   from that flush until the batch was in the outbox
      outbox             INTERNAL   from then until the message was sent for the first time
      publish            PRODUCER   from then until the log confirmed it; states how many attempts that took

The index adds its own span below `kv_events` (`indexer/service/feed.py`). `kv_events` begins by the engine
side's clock; if that is ahead of this process's, or the engine states no time, `consolidate` is empty.
Source of `messaging.*`: OpenTelemetry semantic conventions, "Messaging spans".
"""

import asyncio
from collections import deque
from functools import partial
from random import Random

import msgspec
import structlog

from kv_protocol import codec, subjects
from kv_protocol.ids import WorkerRank
from kv_protocol.trace_context import EventTrace, event_trace
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import until
from kv_runtime.tracing.service import EventTracing
from kv_runtime.tracing.spans import Attributes, SpanData, TraceData
from worker_agent.events.outbox import Outbox, OutMessage

_RETRY_S = 0.1
_RETRY_MAX_S = 2.0
ARRIVALS_MAX = 1024
"""How many arrival times of batches are remembered. If a batch's is forgotten, `outbox` begins at the next one's."""
_SPAN_ID_BITS = 64


_log = structlog.get_logger("rank_stream")


class _Sent(msgspec.Struct):
    """A traced message that the log has not confirmed. Times are nanoseconds since 1970."""

    ids: EventTrace
    arrived_ns: int
    sent_ns: int
    attempts: int = 0


class RankTracer:
    """Traces one rank's messages, on its event loop. The outbox bounds how many are unconfirmed."""

    def __init__(self, tracing: EventTracing, rank: WorkerRank, subject: str) -> None:
        self._tracing, self._rank = tracing, rank
        self._arrivals: deque[tuple[int, int]] = deque(maxlen=ARRIVALS_MAX)
        self._sent: dict[int, _Sent] = {}
        self._bits = Random().getrandbits  # noqa: S311 - ids are no secrets
        self._attributes: Attributes = {
            "messaging.system": "nats",
            "messaging.destination.name": subject,
            "kvrouter.worker": rank.worker_id,
            "kvrouter.dp_rank": rank.dp_rank,
        }

    def arrived(self, last_seq: int) -> None:
        """Note that batches up to this seq are in the outbox."""
        self._arrivals.append((last_seq, self._tracing.wall_ns()))

    def sending(self, epoch: int, message: OutMessage) -> None:
        """Note that the message is handed to the log, for the first time or again."""
        sent = self._sent.get(message.first_seq)
        if sent is None:
            arrived_ns = self._arrival_ns(message.first_seq)
            ids = event_trace(self._rank, epoch, message.first_seq)
            if not self._tracing.is_sampled(ids.trace_id):
                return
            sent = self._sent[message.first_seq] = _Sent(ids, arrived_ns, self._tracing.wall_ns())
        sent.attempts += 1

    def confirmed(self, message: OutMessage) -> None:
        """Note that the log has the message; send its spans if it is traced."""
        sent = self._sent.pop(message.first_seq, None)
        if sent is not None:
            self._tracing.send(self._trace(sent, message))

    def _arrival_ns(self, seq: int) -> int:
        """Return when the batch came into the outbox, and forget the times of batches before it."""
        while self._arrivals and self._arrivals[0][0] < seq:
            self._arrivals.popleft()
        return self._arrivals[0][1] if self._arrivals else self._tracing.wall_ns()

    def _trace(self, sent: _Sent, message: OutMessage) -> TraceData:
        batches = codec.decode_message(message.payload)
        engine_ns = batches[0].engine_time_ns
        arrived_ns = min(sent.arrived_ns, sent.sent_ns)
        began_ns = min(engine_ns, arrived_ns) if engine_ns > 0 else arrived_ns
        ended_ns = max(self._tracing.wall_ns(), sent.sent_ns)
        described = self._attributes | {
            "messaging.batch.message_count": len(batches),
            "messaging.message.body.size": len(message.payload),
            "kvrouter.first_seq": message.first_seq,
            "kvrouter.last_seq": message.last_seq,
            "kvrouter.blocks": sum(len(getattr(batch.event, "sequence_hashes", ())) for batch in batches),
        }
        published: Attributes = {"messaging.operation.type": "send", "kvrouter.attempts": sent.attempts}
        spans = (
            SpanData("kv_events", "internal", sent.ids.span_id, began_ns, ended_ns, described),
            SpanData("consolidate", "internal", self._span_id(), began_ns, arrived_ns, {}),
            SpanData("outbox", "internal", self._span_id(), arrived_ns, sent.sent_ns, {}),
            SpanData("publish", "producer", self._span_id(), sent.sent_ns, ended_ns, published),
        )
        return TraceData(sent.ids.trace_id, 0, spans)

    def _span_id(self) -> int:
        return self._bits(_SPAN_ID_BITS) or 1


class RankStreamSender:
    """Sends one rank's outbox, as a part of a process (`run`); `wake` signals new batches in it."""

    def __init__(
        self,
        model: str,
        rank: WorkerRank,
        outbox: Outbox,
        log: EventLog,
        clock: Clock,
        *,
        tracing: EventTracing | None = None,
    ) -> None:
        """`tracing` None: messages are not traced."""
        self._rank, self._outbox, self._event_log, self._clock = rank, outbox, log, clock
        self._subject = subjects.events(model, rank)
        self._tracer = None if tracing is None else RankTracer(tracing, rank, self._subject)
        self._moved = asyncio.Event()
        self._failure: BaseException | None = None
        self._attempt = 0
        self._retry_s = _RETRY_S
        self.is_refused = False
        """Whether the log has confirmed no message since the last failed publication."""
        self.failures_total = 0
        """Publications not confirmed by the log."""

    def wake(self) -> None:
        """Signal that the outbox has new batches."""
        if self._tracer is not None:
            self._tracer.arrived(self._outbox.last_seq)
        self._moved.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until `stop` is set, then what is left; from then on a failed publication ends this."""
        while True:
            self._moved.clear()
            await self._publish()
            if self._failure is not None:
                if stop.is_set():
                    return
                await self._go_back(self._failure, stop)
            elif not stop.is_set():
                await until(stop, self._moved.wait())
            elif self._outbox.unacked_bytes:
                await self._moved.wait()
            else:
                return

    async def _publish(self) -> None:
        while self._failure is None and (message := self._outbox.next_message()) is not None:
            message_id = subjects.message_id(self._rank, self._outbox.epoch, message.first_seq)
            if self._tracer is not None:
                self._tracer.sending(self._outbox.epoch, message)
            try:
                confirmed = await self._event_log.send(self._subject, message.payload, message_id)
            except BrokerUnavailable as error:
                self._fail(message, error)
            else:
                confirmed.add_done_callback(partial(self._ended, message, self._attempt))
                if self.is_refused:
                    await asyncio.wait([confirmed])

    def _ended(self, message: OutMessage, attempt: int, confirmed: "asyncio.Future[int]") -> None:
        error = confirmed.exception()
        if error is None:
            self._outbox.acknowledge(message)
            if self._tracer is not None:
                self._tracer.confirmed(message)
            self._succeed()
        elif attempt == self._attempt:
            self._fail(message, error)
        self._moved.set()

    def _succeed(self) -> None:
        if self._failure is not None:  # another message failed: everything is published again anyway
            return
        self._retry_s = _RETRY_S
        if self.is_refused:
            self.is_refused = False
            _log.info("published_again", rank=str(self._rank), seq=self._outbox.settled_seq)

    def _fail(self, message: OutMessage, error: BaseException) -> None:
        self._failure = error
        self.failures_total += 1
        log = _log.debug if self.is_refused else _log.warning
        self.is_refused = True
        log("publish_failed", rank=str(self._rank), seq=message.first_seq, reason=str(error))

    async def _go_back(self, failure: BaseException, stop: asyncio.Event) -> None:
        if not isinstance(failure, BrokerUnavailable):
            raise failure
        await self._clock.wait(stop, self._retry_s)
        self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
        self._attempt += 1
        self._failure = None
        self._outbox.go_back()
