"""The span of a message of KV events at an index: below the agent's `kv_events`, whose ids the index computes itself.

apply    CONSUMER   from the message's arrival at the index until it was applied, or what else came of it
"""

from random import Random

from indexer.follow.messages import BatchSpan
from kv_protocol.event_trace import event_trace
from kv_protocol.ids import WorkerRank
from kv_runtime.tracing.service import EventTracing
from kv_runtime.tracing.spans import Attributes, SpanData, TraceData

_SPAN_ID_BITS = 64


class ApplyTracer:
    """Traces what an index does with messages; for its event loop."""

    def __init__(self, tracing: EventTracing) -> None:
        self._tracing = tracing
        self._bits = Random().getrandbits  # noqa: S311 - ids are no secrets
        self.wall_ns = tracing.wall_ns

    def done(self, rank: WorkerRank, batches: BatchSpan, came_ns: int, *, is_applied: bool) -> None:
        """A message that came then was handed to the index.

        Not `is_applied`: the index waits for an earlier one, is in a recovery, or has no use for its epoch.
        """
        ids = event_trace(rank, batches.epoch, batches.first_seq)
        if not self._tracing.is_sampled(ids.trace_id):
            return
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
        ended_ns = max(came_ns, self.wall_ns())
        span = SpanData("apply", "consumer", self._bits(_SPAN_ID_BITS) or 1, came_ns, ended_ns, attributes)
        self._tracing.send(TraceData(ids.trace_id, ids.span_id, (span,)))
