"""The spans of a rank's messages of KV events, from the engine to the log, of the share that is traced.

    kv_events            INTERNAL   from the engine's flush of the first batch until the log has the message
      consolidate        INTERNAL   from that flush until the batch was in the outbox
      outbox             INTERNAL   until the message was sent for the first time
      publish            PRODUCER   until the log confirmed it, with the attempts that it took

The index adds its own span below `kv_events` (`indexer/service/feed.py`). The first begins by the engine side's
clock; where that is ahead of this process's, or the engine states no time, `consolidate` is empty.
Source of `messaging.*`: OpenTelemetry semantic conventions, "Messaging spans".
"""

from collections import deque
from random import Random

from kv_protocol import codec
from kv_protocol.ids import WorkerRank
from kv_protocol.trace_context import EventTrace, event_trace
from kv_runtime.tracing.service import EventTracing
from kv_runtime.tracing.spans import Attributes, SpanData, TraceData
from worker_agent.events.outbox import OutMessage

ARRIVALS_MAX = 1024
"""Remembered times at which batches came into the outbox; of older ones `outbox` begins with the next known time."""
_SPAN_ID_BITS = 64


class _Sent:
    """A traced message that the log has not confirmed. Times are nanoseconds since 1970."""

    __slots__ = ("arrived_ns", "attempts", "ids", "sent_ns")

    def __init__(self, ids: EventTrace, arrived_ns: int, sent_ns: int) -> None:
        self.ids, self.arrived_ns, self.sent_ns, self.attempts = ids, arrived_ns, sent_ns, 0


class RankTracer:
    """Traces one rank's messages; for its event loop. The outbox bounds how many are unconfirmed."""

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
        """Batches up to this seq are in the outbox."""
        self._arrivals.append((last_seq, self._tracing.wall_ns()))

    def sending(self, epoch: int, message: OutMessage) -> None:
        """The message is handed to the log, for the first time or again."""
        sent = self._sent.get(message.first_seq)
        if sent is None:
            arrived_ns = self._arrival_ns(message.first_seq)
            ids = event_trace(self._rank, epoch, message.first_seq)
            if not self._tracing.is_sampled(ids.trace_id):
                return
            sent = self._sent[message.first_seq] = _Sent(ids, arrived_ns, self._tracing.wall_ns())
        sent.attempts += 1

    def confirmed(self, message: OutMessage) -> None:
        """The log has the message: its spans are handed over, if it is traced."""
        sent = self._sent.pop(message.first_seq, None)
        if sent is not None:
            self._tracing.send(self._trace(sent, message))

    def _arrival_ns(self, seq: int) -> int:
        """Return when the batch came into the outbox, and forget the times of batches before it."""
        while self._arrivals and self._arrivals[0][0] < seq:
            self._arrivals.popleft()
        return self._arrivals[0][1] if self._arrivals else self._tracing.wall_ns()

    def _trace(self, sent: _Sent, message: OutMessage) -> TraceData:
        frames = codec.split_message(message.payload)
        *_, engine_ns, _, _ = frames[0].head
        arrived_ns = min(sent.arrived_ns, sent.sent_ns)
        began_ns = min(engine_ns, arrived_ns) if engine_ns > 0 else arrived_ns
        ended_ns = max(self._tracing.wall_ns(), sent.sent_ns)
        described = self._attributes | {
            "messaging.batch.message_count": len(frames),
            "messaging.message.body.size": len(message.payload),
            "kvrouter.first_seq": message.first_seq,
            "kvrouter.last_seq": message.last_seq,
            "kvrouter.blocks": sum(len(frame.hashes) for frame in frames) // 8,
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


def rank_tracer(tracing: EventTracing | None, rank: WorkerRank, subject: str) -> RankTracer | None:
    """Return what traces the messages of a rank; None while that is off."""
    return None if tracing is None else RankTracer(tracing, rank, subject)
