"""The record of a traced request, and the spans that are made of the record when the request ends.

    chat {model}                        SERVER     the request, from its first byte to its end
      prompt                            INTERNAL   rendering, encoding and hashing, if the mode needs it
      queue                             INTERNAL   the wait in the queue, if there was one
      decide                            INTERNAL   one for each decision
      chat | prefill | decode {model}   CLIENT     one for each upstream request; events first_token, last_token
        link                                       to the upstream request before: retry, migration or handoff

`gen_ai.*`, `http.*`, `server.*`, `url.*` and `error.type` are names of OpenTelemetry's semantic conventions; attributes
that have no name there are `kvrouter.*`. Text of clients is cut (`spans.text`); a model's name is part of a span's name
only if workers serve it. Times are nanoseconds since 1970.

While tracing is off there is no `Tracer`, and a request has no record. The record of an unsampled request has only ids
and timestamps: spans are made only for requests whose trace is sent.

Source: OpenTelemetry semantic conventions, "Generative AI client spans", "HTTP spans".
"""

from collections.abc import Callable
from random import getrandbits
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.trace_context import TRACEPARENT, TRACESTATE, parsed_trace_parent, trace_parent
from kv_runtime.tracing.spans import Attributes, Sampling, SpanData, SpanEvent, SpanLink, TraceData, text
from router.decision.verdict import Verdict
from router.http.heads import Headers
from router.http.refusals import Refusal
from router.native import built
from router.request.destination import NO_ANSWER, SERVER_FAULT, RankAttempt

if TYPE_CHECKING:
    from router.request.serving import FleetRequest

TURNS_MAX = 32
"""If a request has more turns, the spans of its first turns are left out."""
StepName = Literal["prompt", "queue"]
_NS_PER_S = 1_000_000_000
_TRACE_ID_BITS, _SPAN_ID_BITS = 128, 64
_OPERATIONS: dict[str, str] = {"completions": "text_completion", "embeddings": "embeddings"}
_OPERATION_OF_PATH = {path: _OPERATIONS[name] for name, path in PATHS.items() if name in _OPERATIONS}
_CHAT = "chat"
_PROVIDER = "kv_router"
_UNNAMED = "_OTHER"
"""`error.type` of an error without a name, by the conventions."""
_PORTS = {"http": 80, "https": 443}


class Turn(msgspec.Struct, eq=False):
    """One decision, and the request that the winner got, if it got one. A time is 0 if its event did not happen."""

    began_ns: int
    decided_ns: int = 0
    verdict: Verdict | None = None
    """None: no worker was chosen; `refused` says why, in a word."""
    refused: str = ""
    span_id: int = 0
    """The span of the upstream request; 0: none was sent."""
    sent_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    attempt: RankAttempt | None = None
    """Set when it is over, like `ended_ns` and `outcome` (ok, refused, failed or cancelled)."""
    outcome: str = ""


class Tracer(NamedTuple):
    """The rule that says which traces are sent, the function that takes one without blocking, and the URLs' scheme."""

    sampling: Sampling
    send: Callable[[TraceData], None]
    scheme: str = "http"


class RequestTrace:
    """The record of one request: its place in the trace, and its turns in their order."""

    def __init__(self, tracer: Tracer, headers: Headers, began_s: float) -> None:
        """`headers` are the client's; `began_s` is when the request began, by `perf_counter`."""
        self._tracer, self._epoch_ns = tracer, time_ns() - perf_counter_ns()
        """When `perf_counter_ns` was 0. The system's clock is read only here: it may be set while the request runs."""
        self._began_ns = self._epoch_ns + round(began_s * _NS_PER_S)
        given = headers.get(TRACEPARENT)
        parent = self._parent = None if given is None else parsed_trace_parent(given)
        """The caller's span; None: the trace begins here."""
        self._trace_id = parent.trace_id if parent is not None else getrandbits(_TRACE_ID_BITS) or 1
        is_sampled = None if parent is None else parent.is_sampled
        self._is_sampled = tracer.sampling.is_sampled(self._trace_id, parent=is_sampled)
        self._span_id = 0
        """The SERVER span; 0: its id is drawn once it is needed."""
        self._turns: list[Turn] = []
        self._steps: dict[StepName, tuple[int, int]] = {}
        """Begin and end of each step that the request needed before its first decision."""

    @property
    def hex_id(self) -> str:
        """The trace id as logs and exemplars have it."""
        return f"{self._trace_id:032x}"

    # ------------------------------------------------------------------------------------------- in a request's order

    def was_in(self, step: StepName, seconds: float) -> None:
        """The request leaves a step that took `seconds` by any clock; 0: it skipped the step."""
        if seconds > 0:
            now_ns = perf_counter_ns() + self._epoch_ns
            self._steps[step] = max(self._began_ns, now_ns - round(seconds * _NS_PER_S)), now_ns

    def deciding(self) -> None:
        """A decision begins."""
        self._turns.append(Turn(perf_counter_ns() + self._epoch_ns))

    def decided(self, verdict: Verdict | None, refused: str = "") -> None:
        """The decision was made; None: no worker was chosen, `refused` says why."""
        turn = self._turns[-1]
        turn.decided_ns, turn.verdict, turn.refused = perf_counter_ns() + self._epoch_ns, verdict, refused

    def calling(self, request: "FleetRequest") -> Headers:
        """A worker is called; return the client's headers with the `traceparent` of the call's span.

        A call for a client that left has no span of its own: it belongs to the SERVER span.
        """
        if request.is_over:
            span_id = self._span_id = self._span_id or _new_span_id()
        else:
            turn = self._turns[-1]
            span_id = turn.span_id = _new_span_id()
            turn.sent_ns = perf_counter_ns() + self._epoch_ns
        headers = {**request.exchange.headers, TRACEPARENT: trace_parent(self._trace_id, span_id, self._is_sampled)}
        if self._parent is None:  # there was no `traceparent`, or no valid one
            headers.pop(TRACESTATE, None)
        return headers

    def began(self) -> None:
        """The first bytes of the worker's answer came."""
        turn = self._turns[-1]
        turn.first_token_ns = turn.first_token_ns or perf_counter_ns() + self._epoch_ns

    def attempt_over(self, attempt: RankAttempt, outcome: str) -> None:
        """The attempt is over, and its lease has ended. If it was cancelled at `local`, the worker was not called."""
        turn = self._turns[-1]
        if outcome == "cancelled" and attempt.stage == "local":
            turn.span_id = 0
        turn.ended_ns, turn.attempt, turn.outcome = perf_counter_ns() + self._epoch_ns, attempt, outcome
        if not attempt.is_streamed and turn.span_id:  # its first bytes say nothing of its first token
            ttft_s = attempt.lease.ttft_s
            turn.first_token_ns = 0 if ttft_s is None else min(turn.sent_ns + round(ttft_s * _NS_PER_S), turn.ended_ns)

    def ended(self, request: "FleetRequest", outcome: str, refusal: Refusal | None) -> bool:
        """The request has ended: send its spans if they are wanted; return whether they were."""
        status = 0
        """Status of the client's answer; 0: unknown, the client left."""
        if outcome != "cancelled":
            last = request.attempts[-1].status if request.attempts else 0
            status = last if refusal is None else refusal.status
        has_failed = outcome == "failed" or status >= SERVER_FAULT
        sampling = self._tracer.sampling
        if not (self._is_sampled or sampling.is_kept(has_failed=has_failed, ttft_s=request.ttft_s)):
            return False
        error = "" if refusal is None else refusal.code or refusal.kind
        if refusal is None and outcome == "failed":
            error = request.attempts[-1].stage if request.attempts else "failed"
        attributes = self._attributes(request, outcome, status) | ({"error.type": error} if error else {})
        operation = attributes["gen_ai.operation.name"]
        spans = [
            SpanData(
                name=f"{operation} {text(request.route.model)}" if request.is_read else f"{operation}",
                kind="server",
                span_id=self._span_id or _new_span_id(),
                start_ns=self._began_ns,
                end_ns=perf_counter_ns() + self._epoch_ns,
                attributes=attributes,
                error=error if has_failed else "",
            )
        ]
        spans += [SpanData(name, "internal", _new_span_id(), *at, {}) for name, at in self._steps.items()]
        before = None
        for turn in self._turns[-TURNS_MAX:]:
            spans.append(_decision(turn))
            if turn.span_id:
                spans.append(_client(turn, before, request.exchange.method))
                before = turn
        parent_id = 0 if self._parent is None else self._parent.span_id
        self._tracer.send(TraceData(self._trace_id, parent_id, tuple(spans)))
        return True

    def _attributes(self, request: "FleetRequest", outcome: str, status: int) -> Attributes:
        """Return the attributes of the SERVER span, without its error."""
        exchange, attempts = request.exchange, request.attempts
        route = request.route if request.is_read else None
        operation = _OPERATION_OF_PATH.get(exchange.path, _CHAT) if route is None else _operation(route.endpoint)
        retries, migrations = request.detours
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "http.request.method": exchange.method,
            "http.route": exchange.path,
            "url.path": exchange.path,
            "url.scheme": self._tracer.scheme,
            "kvrouter.mode": request.mode,
            "kvrouter.outcome": outcome,
            "kvrouter.retries": retries,
            "kvrouter.migrations": migrations,
        }
        if request.model:
            attributes["gen_ai.request.model"] = text(request.model)
        if route is not None:
            attributes["kvrouter.request_id"] = text(route.request_id)
            if route.max_tokens:
                attributes["gen_ai.request.max_tokens"] = route.max_tokens
        if status:
            attributes["http.response.status_code"] = status
        if "queue" in self._steps:
            began_ns, ended_ns = self._steps["queue"]
            attributes["kvrouter.queue_wait_s"] = (ended_ns - began_ns) / _NS_PER_S
        if request.ttft_s is not None:
            attributes["kvrouter.ttft_s"] = request.ttft_s
        _add_usage(attributes, attempts[-1].answer if attempts else NO_ANSWER, 0 if route is None else route.isl_tokens)
        return attributes


def _new_span_id() -> int:
    """Return a random id, not 0."""
    return getrandbits(_SPAN_ID_BITS) or 1


def _decision(turn: Turn) -> SpanData:
    verdict = turn.verdict
    refused = "" if verdict is not None else turn.refused or _UNNAMED
    return SpanData(
        name="decide",
        kind="internal",
        span_id=_new_span_id(),
        start_ns=turn.began_ns,
        end_ns=turn.decided_ns,
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
        "kvrouter.candidates": verdict.candidate_count,
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


def _client(turn: Turn, before: Turn | None, method: str) -> SpanData:
    attempt = turn.attempt
    assert attempt is not None, "what was sent is settled"
    verdict, registration, request = attempt.verdict, attempt.verdict.registration, attempt.verdict.request
    operation = _operation(request.endpoint)
    url = urlsplit(registration.base_url)
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": registration.event_source,
        "gen_ai.request.model": text(request.model),
        "http.request.method": method,
        "server.address": url.hostname or "",
        "server.port": url.port or _PORTS.get(url.scheme, 0),
        "kvrouter.decision_id": verdict.decision_id,
        "kvrouter.phase": request.phase,
        "kvrouter.worker": verdict.winner.worker_id,
        "kvrouter.dp_rank": verdict.winner.dp_rank,
        "kvrouter.outcome": turn.outcome,
    }
    if attempt.status:
        attributes["http.response.status_code"] = attempt.status
    if attempt.reason:
        attributes["error.type"] = attempt.stage
    _add_usage(attributes, attempt.answer, 0)
    word = request.phase if request.phase in ("prefill", "decode") else operation
    return SpanData(
        name=f"{word} {text(request.model)}",
        kind="client",
        span_id=turn.span_id,
        start_ns=turn.sent_ns,
        end_ns=turn.ended_ns,
        attributes=attributes,
        error=text(f"{attempt.stage}: {attempt.reason}") if attempt.reason else "",
        events=_events(turn),
        links=() if before is None else (SpanLink(before.span_id, _why(before)),),
    )


def _events(turn: Turn) -> tuple[SpanEvent, ...]:
    first = (SpanEvent("first_token", turn.first_token_ns),) if turn.first_token_ns else ()
    return (*first, SpanEvent("last_token", turn.ended_ns)) if turn.outcome == "ok" else first


def _why(before: Turn) -> str:
    """Return why another turn followed `before`."""
    if before.attempt is None or not before.attempt.reason:
        return "handoff"
    return "migration" if before.first_token_ns else "retry"


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
