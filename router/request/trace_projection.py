"""What a request records of itself while it is traced (`tracer.py` writes it), and the spans of an ended request.

    chat {model}                        SERVER     the request, from its first byte to its end
      prompt                            INTERNAL   rendering, encoding and hashing, where the mode needs it
      queue                             INTERNAL   the wait in the queue, if there was one
      decide                            INTERNAL   one for each decision
      chat | prefill | decode {model}   CLIENT     one for each upstream request; events first_token, last_token
        link                                       to the upstream request before: retry, migration or handoff

`gen_ai.*`, `http.*`, `server.*`, `url.*` and `error.type` are names of OpenTelemetry's semantic conventions; what those
have no name for is `kvrouter.*`. Text of clients is cut (`spans.text`); a model's name is part of a span's name only
if workers serve it.
Times are seconds of `perf_counter`, as `Exchange.began_s`; None: it did not happen.

Source: OpenTelemetry semantic conventions, "Generative AI client spans", "HTTP spans".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from kv_protocol.decided import RouteRequest
from kv_protocol.openai.endpoints import PATHS
from kv_protocol.trace_context import TraceParent
from kv_runtime.tracing.spans import Attributes, SpanData, SpanEvent, SpanLink, TraceData, text
from router.decision.verdict import Verdict
from router.native import built

SERVER_FAULT = 500


@dataclass(slots=True)
class Turn:
    """One decision, and the request that the winner got, if it got one."""

    began_s: float
    decided_s: float
    verdict: "Verdict | None" = None
    """None: no worker was chosen; `refused` says why, in a word."""
    refused: str = ""
    span_id: int = 0
    """Of the upstream request; 0: none was sent."""
    sent_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    status: int = 0
    """Of the worker's answer; 0: none came."""
    outcome: str = ""
    """ok, refused, failed or cancelled; empty while it is open."""
    stage: str = ""
    reason: str = ""
    """Where and why it failed; empty if it did not."""
    answer: built.Answer = field(default_factory=built.Answer)


Stretch = tuple[float, float]
"""From one moment to another."""


class RequestEnd(NamedTuple):
    """How a request ended. `status` is that of the client's answer; 0: unknown, the client left."""

    route: RouteRequest | None
    """None: it was not understood."""
    model: str
    """As the client wrote it; empty: unknown."""
    method: str
    path: str
    mode: str
    outcome: str
    status: int
    error: str
    """A word for what went wrong; empty: nothing."""
    answer: built.Answer
    ended_s: float
    retries: int = 0
    migrations: int = 0

    @property
    def is_error(self) -> bool:
        """Whether it ended by a fault of the router or its workers."""
        return is_error(self.outcome, self.status)


def is_error(outcome: str, status: int) -> bool:
    """Return whether a request with this outcome and status ended by a fault of the router or its workers."""
    return outcome == "failed" or status >= SERVER_FAULT


class RequestTrace:
    """The record of one request: its place in the trace, and its turns, first one first."""

    __slots__ = ("began_s", "is_sampled", "parent", "prompt", "queue", "span_id", "trace_id", "ttft_s", "turns")

    def __init__(
        self, parent: TraceParent | None, trace_id: int, span_id: int, began_s: float, *, is_sampled: bool
    ) -> None:
        """`parent`: the caller's span; None: the trace begins here. `span_id` 0: it is drawn once it is needed."""
        self.parent, self.trace_id, self.span_id = parent, trace_id, span_id
        self.began_s, self.is_sampled = began_s, is_sampled
        self.turns: list[Turn] = []
        self.prompt: Stretch | None = None
        """While the prompt was rendered, encoded and hashed; None: the mode needs none of it."""
        self.queue: Stretch | None = None
        """While the request waited in the queue; None: it did not."""
        self.ttft_s: float | None = None

    @property
    def hex_id(self) -> str:
        """The trace id as logs and exemplars have it."""
        return f"{self.trace_id:032x}"


TURNS_MAX = 32
"""Of a request with more turns, the spans of the first ones are left out."""
_NS_PER_S = 1_000_000_000
_OPERATIONS: dict[str, str] = {"completions": "text_completion", "embeddings": "embeddings"}
_OPERATION_OF_PATH = {path: _OPERATIONS[name] for name, path in PATHS.items() if name in _OPERATIONS}
_CHAT = "chat"
_PROVIDER = "kv_router"
_UNNAMED = "_OTHER"
"""`error.type` of an error without a name, by the conventions."""
_PORTS = {"http": 80, "https": 443}


def projected(trace: RequestTrace, end: RequestEnd, *, epoch_ns: int, new_span_id: Callable[[], int]) -> TraceData:
    """Return the spans of an ended request.

    `epoch_ns` is when the clock of the record was 0, in nanoseconds since 1970; `new_span_id` returns an id, never 0.
    """
    spans, before = [_server(trace, end, epoch_ns)], None
    for name, stretch in (("prompt", trace.prompt), ("queue", trace.queue)):
        if stretch is not None:
            began_s, ended_s = stretch
            at = (_at(began_s, epoch_ns), _at(ended_s, epoch_ns))
            spans.append(SpanData(name, "internal", new_span_id(), *at, {}))
    for turn in trace.turns[-TURNS_MAX:]:
        spans.append(_decision(turn, epoch_ns, new_span_id()))
        if turn.span_id:
            spans.append(_client(turn, before, end, epoch_ns))
            before = turn
    return TraceData(trace.trace_id, 0 if trace.parent is None else trace.parent.span_id, tuple(spans))


def _server(trace: RequestTrace, end: RequestEnd, epoch_ns: int) -> SpanData:
    route = end.route
    operation = _operation(route.endpoint) if route is not None else _OPERATION_OF_PATH.get(end.path, _CHAT)
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "http.request.method": end.method,
        "http.route": end.path,
        "url.path": end.path,
        "url.scheme": "http",
        "kvrouter.mode": end.mode,
        "kvrouter.outcome": end.outcome,
        "kvrouter.retries": end.retries,
        "kvrouter.migrations": end.migrations,
    }
    if end.model:
        attributes["gen_ai.request.model"] = text(end.model)
    if route is not None:
        attributes["kvrouter.request_id"] = text(route.request_id)
        if route.max_tokens:
            attributes["gen_ai.request.max_tokens"] = route.max_tokens
    if end.status:
        attributes["http.response.status_code"] = end.status
    if trace.queue is not None:
        began_s, ended_s = trace.queue
        attributes["kvrouter.queue_wait_s"] = ended_s - began_s
    if trace.ttft_s is not None:
        attributes["kvrouter.ttft_s"] = trace.ttft_s
    if end.error:
        attributes["error.type"] = end.error
    _add_usage(attributes, end.answer, 0 if route is None else route.isl_tokens)
    return SpanData(
        name=operation if route is None else f"{operation} {text(route.model)}",
        kind="server",
        span_id=trace.span_id,
        start_ns=_at(trace.began_s, epoch_ns),
        end_ns=_at(end.ended_s, epoch_ns),
        attributes=attributes,
        error=end.error if end.is_error else "",
    )


def _decision(turn: Turn, epoch_ns: int, span_id: int) -> SpanData:
    verdict = turn.verdict
    refused = "" if verdict is not None else turn.refused or _UNNAMED
    return SpanData(
        name="decide",
        kind="internal",
        span_id=span_id,
        start_ns=_at(turn.began_s, epoch_ns),
        end_ns=_at(turn.decided_s, epoch_ns),
        attributes={"error.type": refused} if verdict is None else _of_verdict(verdict),
        error=refused,
    )


def _of_verdict(verdict: Verdict) -> Attributes:
    request, winner = verdict.request, verdict.winner
    attributes: Attributes = {
        "kvrouter.decision_id": verdict.decision_id,
        "kvrouter.phase": request.phase,
        "kvrouter.policy": verdict.policy,
        "kvrouter.reason": verdict.reason,
        "kvrouter.action": verdict.action,
        "kvrouter.worker": winner.worker_id,
        "kvrouter.dp_rank": winner.dp_rank,
        "kvrouter.trust": verdict.trust,
        "kvrouter.candidates": len(verdict.rank_indices),
        "kvrouter.overlap_blocks": verdict.overlap_blocks,
        "kvrouter.expected_blocks": verdict.expected_blocks,
        "kvrouter.reusable_blocks": request.reusable_blocks,
        "kvrouter.regret_blocks": verdict.regret_blocks,
    }
    if verdict.margin is not None:
        attributes["kvrouter.margin"] = verdict.margin
    if verdict.ttft_s is not None:
        attributes["kvrouter.predicted_ttft_s"] = verdict.ttft_s
    if verdict.has_costs:
        attributes["kvrouter.cost_unit"] = verdict.cost_unit
        terms = verdict.terms(verdict.winner_at)
        for name in terms.__struct_fields__:
            attributes[f"kvrouter.cost.{name}"] = getattr(terms, name)
    return attributes


def _client(turn: Turn, before: Turn | None, end: RequestEnd, epoch_ns: int) -> SpanData:
    verdict, sent_s = turn.verdict, turn.sent_s
    assert verdict is not None, "what was sent was decided"
    assert sent_s is not None, "it has an id, so it was sent"
    request = verdict.request
    operation = _operation(request.endpoint)
    registration = verdict.registration
    url = urlsplit(registration.base_url)
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": registration.event_source,
        "gen_ai.request.model": text(request.model),
        "http.request.method": end.method,
        "server.address": url.hostname or "",
        "server.port": url.port or _PORTS.get(url.scheme, 0),
        "kvrouter.decision_id": verdict.decision_id,
        "kvrouter.phase": request.phase,
        "kvrouter.worker": verdict.winner.worker_id,
        "kvrouter.dp_rank": verdict.winner.dp_rank,
        "kvrouter.outcome": turn.outcome,
    }
    if turn.status:
        attributes["http.response.status_code"] = turn.status
    if turn.reason:
        attributes["error.type"] = turn.stage
    _add_usage(attributes, turn.answer, 0)
    ended_s = end.ended_s if turn.ended_s is None else turn.ended_s
    word = request.phase if request.phase in ("prefill", "decode") else operation
    return SpanData(
        name=f"{word} {text(request.model)}",
        kind="client",
        span_id=turn.span_id,
        start_ns=_at(sent_s, epoch_ns),
        end_ns=_at(ended_s, epoch_ns),
        attributes=attributes,
        error=text(f"{turn.stage}: {turn.reason}") if turn.reason else "",
        events=_events(turn, ended_s, epoch_ns),
        links=() if before is None else (SpanLink(before.span_id, _why(before)),),
    )


def _events(turn: Turn, ended_s: float, epoch_ns: int) -> tuple[SpanEvent, ...]:
    first_s = turn.first_token_s
    first = () if first_s is None else (SpanEvent("first_token", _at(first_s, epoch_ns)),)
    return (*first, SpanEvent("last_token", _at(ended_s, epoch_ns))) if turn.outcome == "ok" else first


def _why(before: Turn) -> str:
    """Return why a turn follows one before."""
    if not before.reason:
        return "handoff"
    return "retry" if before.first_token_s is None else "migration"


def _operation(endpoint: str) -> str:
    return _OPERATIONS.get(endpoint, _CHAT)


def _add_usage(attributes: Attributes, answer: built.Answer, isl_tokens: int) -> None:
    input_tokens = answer.input_tokens or isl_tokens
    if input_tokens:
        attributes["gen_ai.usage.input_tokens"] = input_tokens
    if answer.output_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = answer.output_tokens
    if answer.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = answer.cached_tokens


def _at(seconds: float, epoch_ns: int) -> int:
    return epoch_ns + round(seconds * _NS_PER_S)
