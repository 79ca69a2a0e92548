"""Sends spans to the collector, from a thread of its own.

put      the event loop hands over the spans of one request; when `requests_max` wait already, they are dropped
work     the thread sends them in batches, and drops what the collector does not take: it tries no batch twice
         beyond what the sender itself repeats
stop     what waits is sent for `LAST_S`; the rest is dropped

A collector that is away, slow or refuses costs requests nothing: spans are dropped and counted.
"""

import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal, Protocol, get_args

import structlog

from kv_runtime.clock import Clock, SystemClock
from kv_runtime.supervise import Part, thread_part
from kv_runtime.telemetry import Family, RateLimitedLog, by_name, counter
from kv_runtime.tracing.spans import TraceData

DropReason = Literal["queue_full", "not_sent", "stopped"]
"""Too many wait; the collector did not take them; they waited when the process stopped."""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
REQUESTS_MAX = 2048
"""Requests whose spans wait, as many spans as the SDK's queue has and more: some MB."""
BATCH_SPANS = 512
"""Spans of a batch, as in the SDK; the last request's may exceed it."""
LAST_S = 2.0
"""How long a process that stops goes on sending."""
BATCH_S = 1.0
_IDLE_S = 0.2
"""How soon an idle thread notices that it is to end."""
_JOIN_S = 15.0

_log = structlog.get_logger("tracing")


class Sender(Protocol):
    """Sends spans to a collector."""

    def send(self, traces: Sequence[TraceData]) -> str:
        """Send the spans, which may block; return why the collector has not got them, empty if it has."""

    def close(self) -> None:
        """Close the connections."""


class SpanExporter:
    """The queue, and the thread that empties it. `put` belongs to the event loop, `work` to the thread."""

    def __init__(
        self, sender: Sender, *, requests_max: int = REQUESTS_MAX, batch_s: float = BATCH_S, clock: Clock | None = None
    ) -> None:
        """`batch_s`: how long the first request of a batch waits for others."""
        self._sender, self._requests_max, self._batch_s = sender, requests_max, batch_s
        self._waiting: SimpleQueue[TraceData] = SimpleQueue()
        self._has_ended = False
        self.sent = 0
        self.dropped: dict[str, int] = dict.fromkeys(DROP_REASONS, 0)
        """What became of the spans so far."""
        self._failures = RateLimitedLog(_log, clock or SystemClock())

    def put(self, trace: TraceData) -> None:
        """Hand over the spans of a request; never blocks."""
        if self._has_ended:
            self.dropped["stopped"] += len(trace.spans)
        elif self._waiting.qsize() >= self._requests_max:
            self.dropped["queue_full"] += len(trace.spans)
        else:
            self._waiting.put(trace)

    def part(self, stage: int) -> Part:
        """Return the thread as a part of the process."""
        return thread_part("span-exporter", self.work, stage=stage, join_s=_JOIN_S)

    def work(self, stop: threading.Event) -> None:
        """Send what is put until `stop` is set, and then the rest; the body of the thread."""
        while not stop.is_set():
            self._send(list(self._batch(stop)))
        ends_s = monotonic() + LAST_S
        while not self._waiting.empty() and monotonic() < ends_s:
            self._send(list(self._batch(stop)))
        self._has_ended = True
        while not self._waiting.empty():
            self.dropped["stopped"] += len(self._waiting.get().spans)
        self._sender.close()

    def _batch(self, stop: threading.Event) -> Iterator[TraceData]:
        """Yield requests until the batch is full or its first one has waited for long; at a stop until none waits."""
        spans, ends_s = 0, 0.0
        while spans < BATCH_SPANS:
            try:
                trace = self._waiting.get(timeout=0.0 if stop.is_set() else _IDLE_S)
            except Empty:
                if stop.is_set() or not spans:
                    return
            else:
                ends_s = ends_s or monotonic() + self._batch_s
                spans += len(trace.spans)
                yield trace
            if monotonic() >= ends_s:
                return

    def _send(self, batch: list[TraceData]) -> None:
        if not batch:
            return
        spans = sum(len(trace.spans) for trace in batch)
        try:
            failure = self._sender.send(batch)
        except Exception as error:  # noqa: BLE001 - the edge: whatever a collector does, requests go on
            failure = f"{type(error).__name__}: {error}"
        if failure:
            self.dropped["not_sent"] += spans
            self._failures.warning("spans_not_sent", spans=spans, reason=failure[:500])
        else:
            self.sent += spans


def span_families(exporter: SpanExporter | None) -> Iterator[Family]:
    """Yield the metrics of spans; None: tracing is off, and all are 0."""
    sent = 0 if exporter is None else exporter.sent
    yield counter("spans_sent", "Spans that the collector took; 0 while tracing is off", (), [((), sent)])
    dropped = by_name((), dict.fromkeys(DROP_REASONS, 0) if exporter is None else exporter.dropped)
    yield counter("spans_dropped", "Spans that were to be sent and were not", ("reason",), dropped)
