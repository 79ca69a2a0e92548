"""Begins the records of requests, and hands the spans of those that are sent to the exporter.

While tracing is off there is no `Tracer`, and a request has no record. An unsampled request costs its ids and a few
times; spans are made for what is sent alone.
"""

import random
from collections.abc import Callable
from time import perf_counter, time_ns

from kv_protocol.trace_context import TRACEPARENT, TRACESTATE, TraceParent, parsed_trace_parent, trace_parent
from kv_runtime.tracing.spans import Sampling, TraceData
from router.decision.verdict import Verdict
from router.http.heads import Headers
from router.request.attempt import RankAttempt
from router.request.trace_projection import RequestEnd, RequestTrace, Turn, projected

_NS_PER_S = 1_000_000_000
_TRACE_ID_BITS, _SPAN_ID_BITS = 128, 64


class Tracer:
    """Traces the requests of one process; for its event loop."""

    def __init__(
        self,
        sampling: Sampling,
        send: Callable[[TraceData], None],
        *,
        random_bits: Callable[[int], int] | None = None,
        now_s: Callable[[], float] = perf_counter,
        wall_ns: Callable[[], int] = time_ns,
    ) -> None:
        """`send` gets the spans of a request, and does not block; `random_bits` returns a number of so many bits."""
        self._sampling, self._send = sampling, send
        self._bits = random_bits or random.Random().getrandbits  # noqa: S311 - ids are no secrets
        self.now_s, self._wall_ns = now_s, wall_ns

    def begin(self, headers: Headers, began_s: float) -> "TracedRequest":
        """Return the record of a request that came with these headers; `began_s` is by `now_s`."""
        given = headers.get(TRACEPARENT)
        parent = None if given is None else parsed_trace_parent(given)
        trace_id = parent.trace_id if parent is not None else self._bits(_TRACE_ID_BITS) or 1
        is_sampled = self._sampling.is_sampled(trace_id, parent=None if parent is None else parent.is_sampled)
        return TracedRequest(self, parent, trace_id, began_s, is_sampled=is_sampled)

    def new_span_id(self) -> int:
        """Return a random id, not 0."""
        return self._bits(_SPAN_ID_BITS) or 1

    def is_wanted(self, trace: RequestTrace, *, has_failed: bool) -> bool:
        """Return whether the spans of an ended request are to be sent."""
        return trace.is_sampled or self._sampling.is_kept(has_failed=has_failed, ttft_s=trace.ttft_s)

    def send(self, trace: RequestTrace, end: RequestEnd) -> None:
        """Hand the spans of an ended request over."""
        trace.span_id = trace.span_id or self.new_span_id()
        epoch_ns = self._wall_ns() - round(self.now_s() * _NS_PER_S)
        self._send(projected(trace, end, epoch_ns=epoch_ns, new_span_id=self.new_span_id))


class TracedRequest(RequestTrace):
    """A record that is being written, in the order of the methods."""

    __slots__ = ("_tracer",)

    def __init__(
        self, tracer: Tracer, parent: TraceParent | None, trace_id: int, began_s: float, *, is_sampled: bool
    ) -> None:
        super().__init__(parent, trace_id, 0, began_s, is_sampled=is_sampled)
        self._tracer = tracer

    def prompted(self, seconds: float) -> None:
        """The prompt is ready, after this time."""
        now_s = self._tracer.now_s()
        self.prompt = max(self.began_s, now_s - seconds), now_s

    def waited(self, seconds: float) -> None:
        """The request left the queue, after this time; 0: it never waited."""
        if seconds > 0:
            now_s = self._tracer.now_s()
            self.queue = max(self.began_s, now_s - seconds), now_s

    def deciding(self) -> None:
        """A decision begins."""
        now_s = self._tracer.now_s()
        self.turns.append(Turn(now_s, now_s))

    def decided(self, verdict: Verdict | None, refused: str = "") -> None:
        """The decision was made; None: no worker was chosen, `refused` says why."""
        turn = self.turns[-1]
        turn.decided_s, turn.verdict, turn.refused = self._tracer.now_s(), verdict, refused

    def sending(self, client: Headers) -> Headers:
        """The request goes to the chosen worker; return the client's headers with this upstream request's span."""
        turn = self.turns[-1]
        turn.span_id, turn.sent_s = self._tracer.new_span_id(), self._tracer.now_s()
        return self._within(turn.span_id, client)

    def not_sent(self) -> None:
        """It could not be sent after all."""
        turn = self.turns[-1]
        turn.span_id, turn.sent_s = 0, None

    def beside(self, client: Headers) -> Headers:
        """Return the client's headers for an upstream request without a span: it belongs to the SERVER span."""
        self.span_id = self.span_id or self._tracer.new_span_id()
        return self._within(self.span_id, client)

    def _within(self, span_id: int, client: Headers) -> Headers:
        """Return the headers with the `traceparent` of the span; a `tracestate` beside no valid one is left out."""
        headers = {**client, TRACEPARENT: trace_parent(self.trace_id, span_id, self.is_sampled)}
        if self.parent is None:
            headers.pop(TRACESTATE, None)
        return headers

    def began(self) -> None:
        """The first bytes of the worker's answer came."""
        turn = self.turns[-1]
        if turn.first_token_s is None:
            turn.first_token_s = self._tracer.now_s()

    def attempt_over(self, attempt: RankAttempt, outcome: str) -> None:
        """The worker's part is over, and its lease has ended."""
        turn = self.turns[-1]
        turn.ended_s = self._tracer.now_s()
        turn.status, turn.outcome, turn.answer = attempt.status, outcome, attempt.answer
        if attempt.reason:
            turn.stage, turn.reason = attempt.stage, attempt.reason
        if not attempt.is_streamed and turn.sent_s is not None:  # its first bytes say nothing of its first token
            ttft_s = attempt.lease.ttft_s
            turn.first_token_s = None if ttft_s is None else min(turn.sent_s + ttft_s, turn.ended_s)

    def is_wanted(self, *, has_failed: bool) -> bool:
        """Return whether the spans of the request, which has ended, are to be sent."""
        return self._tracer.is_wanted(self, has_failed=has_failed)

    def send(self, end: RequestEnd) -> None:
        """Send the request's spans."""
        self._tracer.send(self, end)
