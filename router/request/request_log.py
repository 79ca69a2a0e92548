"""The request log: one line a request, for operators.

| event | level | of |
|---|---|---|
| `request_ended` | info | the share `telemetry.request_log_ratio` of requests, drawn by the hash of their ids |
| `request_refused` | warning | requests answered with an error: the router's own, or a worker's that was passed on |
| `request_cut_off` | warning | answers that a worker began and did not finish |

The draw has no seed: routers with the same ratio log the same requests. The last two are logged always, one line a
reason in 10 s, and every line of a request that was drawn. A line has names, counts and times; what a client wrote is
not in it, but for the id that it gave its request and the tenant as `queue.fair_share_by` names it.
"""

import re
from typing import Any

import structlog
from xxhash import xxh3_64_intdigest

from kv_protocol.decided import RouteRequest
from kv_protocol.openai.inbound import ChatInbound, CompletionInbound, EmbeddingsInbound
from kv_protocol.openai.responses import ResponsesInbound
from kv_runtime.clock import Clock
from kv_runtime.telemetry import RateLimitedLog
from router.http.refusals import Refusal
from router.request.attempt import CLIENT_FAULT, RankAttempt
from router.request.request import Request

_HASHES = 1 << 64
_KINDS = (ChatInbound, CompletionInbound, ResponsesInbound, EmbeddingsInbound)
_FIELDS = frozenset(field for kind in _KINDS for field in kind.__struct_encode_fields__)
"""Parameters that a refusal may name in the log: an unknown field's name is the client's own text."""
_NAME = re.compile(r"\w*")

_log = structlog.get_logger("requests")


class RequestLog:
    """Writes the log lines. `is_on` is false if `ratio` is 0: then `ended` is needed for errors only."""

    def __init__(self, ratio: float, clock: Clock) -> None:
        self.is_on = ratio > 0
        self._ratio = ratio
        self._rarely = RateLimitedLog(_log, clock)

    def ended(self, request: Request[RankAttempt], outcome: str, refusal: Refusal | None, e2e_s: float) -> None:
        """Log the request if it was drawn, or ended with an error of the router. `e2e_s`: since its first byte."""
        is_drawn = self._is_drawn(request)
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
            _log.info(event, **fields)
        elif is_drawn:
            _log.warning(event, **fields)
        else:
            self._rarely.warning(event, key=fields.get("reason", ""), **fields)

    def refused(self, refusal: Refusal) -> None:
        """Log that a request was refused without being served."""
        fields = _of_refusal(refusal)
        if self._ratio >= 1:
            _log.warning("request_refused", **fields)
        else:
            self._rarely.warning("request_refused", key=fields["reason"], **fields)

    def _is_drawn(self, request: Request[RankAttempt]) -> bool:
        if not request.is_read:
            return self._ratio >= 1
        return xxh3_64_intdigest(request.route.request_id.encode()) < self._ratio * _HASHES


def _fields(request: Request[RankAttempt], outcome: str, refusal: Refusal | None, e2e_s: float) -> dict[str, Any]:
    """Return the line's fields; unknown ones are left out."""
    attempts = request.attempts
    last = attempts[-1] if attempts else None
    retries, migrations = request.detours
    known = {
        "outcome": outcome,
        **(_of_route(request.route) if request.is_read else {}),
        "trace_id": "" if request.trace is None else request.trace.hex_id,
        **({} if last is None else _of_attempt(last)),
        "ttft_ms": _milliseconds(request.ttft_s),
        "e2e_ms": _milliseconds(e2e_s),
        "mode": request.mode,
        "phases": [f"{each.verdict.request.phase} {each.rank}" for each in attempts],
        "retries": retries,
        "migrations": migrations,
        "body_bytes": len(request.exchange.body),
        "reason": last.stage if last is not None and last.reason else "",  # of an answer that was cut off
        **({} if refusal is None else _of_refusal(refusal)),
    }
    return {name: value for name, value in known.items() if value not in (None, "", [])}


def _of_route(route: RouteRequest) -> dict[str, Any]:
    return {
        "request_id": route.request_id,
        "decision_id": route.decision_id,
        "model": route.model,
        "tenant": route.tenant,
        "isl_tokens": route.isl_tokens,
    }


def _of_attempt(attempt: RankAttempt) -> dict[str, Any]:
    verdict, answer = attempt.verdict, attempt.answer
    return {
        "decision_id": verdict.decision_id,
        "status": attempt.status or None,
        "worker": verdict.winner.worker_id,
        "rank": verdict.winner.dp_rank,
        "trust": verdict.trust,
        "overlap_tokens": verdict.overlap_blocks * verdict.request.block_size,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "itl_ms": _milliseconds(attempt.lease.itl_s),
    }


def _of_refusal(refusal: Refusal) -> dict[str, Any]:
    fields = {"status": refusal.status, "reason": refusal.code or refusal.kind}
    param = _NAME.match(refusal.param or "")
    return fields | ({"param": param[0]} if param is not None and param[0] in _FIELDS else {})


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
