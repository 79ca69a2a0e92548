"""Records requests that workers of the fleet serve: in leases, breakers, metrics, traces and the request log.

The request log has one line a request, for operators:

| event | level | requests |
|---|---|---|
| `request_ended` | info | the share `telemetry.request_log_ratio` of requests, drawn by the hash of their ids |
| `request_refused` | warning | those answered with an error of the router, or with a worker's failure (429, 5xx) |
| `request_cut_off` | warning | those whose answer a worker began and did not finish |

A worker's other 4xx is a `request_ended`. The draw has no seed: routers with the same ratio log the same requests. The
last two events are also logged for requests that were not drawn: one line per reason in 10 s. A line has names, counts
and times. It has no text of the client, except the id that it gave its request, and the tenant as `queue.fair_share_by`
names it.
"""

import re
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
from xxhash import xxh3_64_intdigest

from kv_protocol.decision import Exclusion
from kv_protocol.journal import AttemptEnded, AttemptOutcome, OutcomeName
from kv_protocol.openai.inbound import ChatInbound, CompletionInbound, EmbeddingsInbound
from kv_protocol.openai.responses import ResponsesInbound
from kv_runtime.telemetry import RateLimitedLog
from router.decision.routing import Routing
from router.http.exchange import Exchange
from router.http.refusals import Refusal
from router.metrics import RequestMetrics
from router.queue.gate import Admission
from router.request.destination import CLIENT_FAULT, Destination, RankAttempt
from router.request.replies import log_names

if TYPE_CHECKING:
    from router.request.serving import FleetRequest

_HASHES = 1 << 64
_KINDS = (ChatInbound, CompletionInbound, ResponsesInbound, EmbeddingsInbound)
_FIELDS = frozenset(field for kind in _KINDS for field in kind.__struct_encode_fields__)
"""The parameters that a logged refusal may name. Unknown fields are not named: their names are a client's own text."""
_NAME = re.compile(r"\w*")

_log, _requests = structlog.get_logger("router"), structlog.get_logger("requests")


class FleetRecords(Destination[RankAttempt]):
    """The part of `Serving` that records requests."""

    def __init__(self, routing: Routing, admission: Admission, metrics: RequestMetrics, log_ratio: float) -> None:
        """`log_ratio` is the share of requests that the request log gets."""
        self.routing, self._admission, self.metrics = routing, admission, metrics
        self._breakers, self._log_ratio = routing.state.breakers, log_ratio
        self._worker_log = RateLimitedLog(_log, routing.clock)
        self._request_log = RateLimitedLog(_requests, routing.clock)

    def unserved(self, request: "FleetRequest", exclusions: tuple[Exclusion, ...]) -> None:
        """Record that the request is refused because no worker is eligible."""
        self.routing.refuse(request.route, exclusions)

    def left_queue(self, request: "FleetRequest", since_s: float) -> None:
        """Record how long the request was in the queue, which it joined at `since_s` and has left."""
        waited_s = self.routing.clock.now() - since_s
        self.metrics.queue_waited(waited_s)
        if request.trace is not None:
            request.trace.was_in("queue", waited_s)

    def began(self, request: "FleetRequest", attempt: RankAttempt) -> None:
        """Record that the worker computed the prompt, and, of a stream, when its first token came; poke the queue."""
        attempt.lease.first_token()
        if request.trace is not None:
            request.trace.began()
        if attempt.is_streamed and attempt.is_success and not request.plan.is_aside:
            self._first_token(request, attempt, attempt.lease.first_byte_s)
        if self._admission.waiting:
            self._admission.poke()

    def _first_token(self, request: "FleetRequest", attempt: RankAttempt, ttft_s: float | None) -> None:
        """The answer's first token came: record when, unless another worker began the client's answer."""
        if ttft_s is not None and request.progress is None:
            if request.attempts:
                ttft_s += attempt.verdict.now_s - request.attempts[0].verdict.now_s
            self.metrics.first_token(request.mode, request.model, attempt.rank.worker_id, ttft_s)
            request.ttft_s = ttft_s

    def settle(self, request: "FleetRequest", attempt: RankAttempt, outcome: OutcomeName) -> None:
        """An attempt is over: end its lease, update the rank's breaker, poke the queue."""
        lease, answer = attempt.lease, attempt.answer
        lease.end(outcome, answer, attempt.is_streamed, self.metrics if request.is_over else None)
        if outcome != "ok" or request.attempts or self._breakers.by_key:  # else no breaker changes
            self._judge(request, attempt, "cancelled" if outcome == "cancelled" else attempt.outcome)
        if self._admission.waiting:
            self._admission.poke()
        if request.trace is not None:
            request.trace.attempt_over(attempt, outcome)
        if outcome == "ok" and request.is_over:  # the client has its answer
            if lease.ttft_s is not None and (answer.came_whole or not attempt.is_streamed):
                self._first_token(request, attempt, lease.ttft_s)
            asked = attempt.verdict.request
            if answer.cached_tokens is not None and asked.known_tokens and asked.phase != "decode":
                self.routing.compare(attempt.verdict, answer.cached_tokens)

    def _judge(self, request: "FleetRequest", attempt: RankAttempt, outcome: AttemptOutcome) -> None:
        """Tell the rank's breaker the outcome; an "ok" also counts against ranks at which this request erred before."""
        rank = attempt.rank
        erred = tuple(each.rank for each in request.attempts if each.outcome == "erred")
        if outcome == "ok" and not erred and not self._breakers.by_key:
            return
        if outcome in ("failed", "erred"):
            self._worker_log.warning(
                "worker_failed",
                key=(rank, attempt.stage),
                worker=rank.worker_id,
                dp_rank=rank.dp_rank,
                phase=attempt.stage,
                reason=attempt.reason,
                **log_names(request),
            )
            self.metrics.worker_failed(rank.worker_id, attempt.stage)
        self.routing.apply(
            AttemptEnded(
                now_s=self.routing.clock.now(),
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                outcome=outcome,
                phase=attempt.stage if attempt.reason else "",
                reason=attempt.reason,
                retry_after_s=attempt.retry_after_s,
                decision_id=attempt.verdict.request.decision_id,
                erred_before=erred if outcome == "ok" else (),
            )
        )

    def ended(self, request: "FleetRequest", outcome: OutcomeName, refusal: Refusal | None) -> None:
        """The request is over: count and log it, and send its trace if it is wanted."""
        exchange = request.exchange
        e2e_s = perf_counter() - exchange.began_s
        self.metrics.end(request.model, request.mode, outcome, e2e_s)
        if exchange.account is not None:
            exchange.account.spend("tokens", _tokens_of(request))
        has_detours = outcome != "ok" or len(request.attempts) > 1 or bool(request.plan.reroutes)
        if has_detours or self._log_ratio:
            if request.place is not None:
                self._admission.cancel(request.place)
                self.left_queue(request, request.place.arrived_s)
                request.place = None  # it refers to the request, by its callback
            self._count_detours(request)
            self._log_end(request, outcome, refusal, e2e_s)
        trace = request.trace
        if trace is not None and trace.ended(request, outcome, refusal):
            decision_id = request.route.decision_id if request.is_read else ""
            self.metrics.traced(request.mode, trace.hex_id, decision_id, e2e_s, request.ttft_s)

    def _count_detours(self, request: "FleetRequest") -> None:
        for attempt in request.attempts[:-1]:
            if attempt.is_retried:
                self.metrics.count("retries", attempt.stage)
        for why in request.plan.reroutes if request.is_read else ():
            self.metrics.count("request_turns", why)
        if request.stream_loss is not None:
            self.metrics.count("streams_lost", request.stream_loss)

    def _log_end(self, request: "FleetRequest", outcome: str, refusal: Refusal | None, e2e_s: float) -> None:
        """Log a request that was drawn, refused, or failed. `e2e_s`: seconds since its first byte."""
        is_drawn = self._log_ratio >= 1
        if request.is_read:
            is_drawn = xxh3_64_intdigest(request.route.request_id.encode()) < self._log_ratio * _HASHES
        event = "request_ended"
        if refusal is not None:
            event = "request_refused"
        elif outcome == "failed":
            is_error_answer = bool(request.attempts) and request.attempts[-1].status >= CLIENT_FAULT
            event = "request_refused" if is_error_answer else "request_cut_off"
        elif not is_drawn:
            return
        fields = _fields(request, outcome, refusal, e2e_s)
        if event == "request_ended":
            _requests.info(event, **fields)
        else:
            self._warn(event, fields, is_drawn=is_drawn)

    def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """Log and refuse a request before it is served; `ended` is not called for it."""
        exchange.refuse(refusal)
        self._warn("request_refused", _of_refusal(refusal), is_drawn=self._log_ratio >= 1)

    def _warn(self, event: str, fields: dict[str, Any], *, is_drawn: bool) -> None:
        if is_drawn:
            _requests.warning(event, **fields)
        else:
            self._request_log.warning(event, key=fields.get("reason", ""), **fields)


def _tokens_of(request: "FleetRequest") -> int:
    """Return the tokens of prompt and answer; of an answer that was cut off those that had come."""
    if not request.attempts:
        return 0
    last, answer = request.attempts[-1], request.attempts[-1].answer
    later = request.events_when_left if answer.later_tokens is None else answer.later_tokens
    before = 0 if request.progress is None else request.progress.token_count
    prompt_tokens = request.route.known_tokens or answer.input_tokens or 0
    return prompt_tokens + (answer.output_tokens or before + later + last.has_begun)


def _fields(request: "FleetRequest", outcome: str, refusal: Refusal | None, e2e_s: float) -> dict[str, Any]:
    """Return the line's fields; unknown ones are left out."""
    attempts, (retries, migrations) = request.attempts, request.detours
    known: dict[str, Any] = {"outcome": outcome}
    if request.is_read:
        route = request.route
        known |= {name: getattr(route, name) for name in ("request_id", "decision_id", "model", "tenant", "isl_tokens")}
    known |= {
        "trace_id": "" if request.trace is None else request.trace.hex_id,
        "ttft_ms": _milliseconds(request.ttft_s),
        "e2e_ms": _milliseconds(e2e_s),
        "mode": request.mode,
        "phases": [f"{each.verdict.request.phase} {each.rank}" for each in attempts],
        "retries": retries,
        "migrations": migrations,
        "body_bytes": len(request.exchange.body),
    }
    if attempts:
        last, verdict, answer = attempts[-1], attempts[-1].verdict, attempts[-1].answer
        known |= {
            "decision_id": verdict.decision_id,
            "status": last.status or None,
            "worker": verdict.winner.worker_id,
            "rank": verdict.winner.dp_rank,
            "trust": verdict.trust,
            "overlap_tokens": verdict.overlap_blocks * verdict.request.block_size,
            "cached_tokens": answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "itl_ms": _milliseconds(last.lease.itl_s),
            "reason": last.stage if last.reason else "",  # why the answer was cut off
        }
    if refusal is not None:
        known |= _of_refusal(refusal)
    return {name: value for name, value in known.items() if value not in (None, "", [])}


def _of_refusal(refusal: Refusal) -> dict[str, Any]:
    fields = {"status": refusal.status, "reason": refusal.code or refusal.kind}
    param = _NAME.match(refusal.param or "")
    return fields | ({"param": param[0]} if param is not None and param[0] in _FIELDS else {})


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
