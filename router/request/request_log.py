"""The request log: one line a request, for operators.

| event | level | of |
|---|---|---|
| `request_ended` | info | the share `telemetry.request_log_ratio` of requests, drawn by the hash of their ids |
| `request_refused` | warning | requests that the router answered with an error of its own |
| `request_cut_off` | warning | answers that a worker began and did not finish |

The draw has no seed: routers with the same ratio log the same requests. The last two are logged always, one line a
reason in 10 s, and every line of a request that was drawn. A line has names, counts and times; what a client wrote is
not in it, but for the id that it gave its request and the tenant as `queue.fair_share_by` names it.
"""

import re
from typing import Any, NamedTuple

import structlog
from xxhash import xxh3_64_intdigest

from kv_protocol.decided import RouteRequest
from kv_protocol.openai.embeddings import EmbeddingsInbound
from kv_protocol.openai.inbound import ChatInbound, CompletionInbound
from kv_protocol.openai.responses import ResponsesInbound
from kv_runtime.clock import Clock
from kv_runtime.telemetry import RateLimitedLog
from router.request.attempt import CLIENT_FAULT
from router.request.plan import RequestPlan
from router.request.rank_attempt import RankAttempt
from router.request.refusals import Refusal
from router.request.usage import Usage

_HASHES = 1 << 64
_KINDS = (ChatInbound, CompletionInbound, ResponsesInbound, EmbeddingsInbound)
_FIELDS = frozenset(field for kind in _KINDS for field in kind.__struct_encode_fields__)
"""Parameters that a refusal may name in the log: an unknown field's name is the client's own text."""
_NAME = re.compile(r"\w*")

_log = structlog.get_logger("requests")


class EndedRequest(NamedTuple):
    """An ended request, as far as it came.

    `route` and `plan` are None where it was not understood; `attempts` are all of its tries at ranks, the last one
    last, and `usage` is that one's; `e2e_s` counts from the request's first byte.
    """

    route: RouteRequest | None
    plan: RequestPlan | None
    mode: str
    attempts: tuple[RankAttempt, ...]
    usage: Usage
    outcome: str
    refusal: Refusal | None
    e2e_s: float
    body_bytes: int
    trace_id: str = ""
    """Empty: the request was not traced."""


class RequestLog:
    """Writes the log lines. `is_on` is false if `ratio` is 0: then `ended` is needed for errors only."""

    def __init__(self, ratio: float, clock: Clock) -> None:
        self.is_on = ratio > 0
        self._ratio = ratio
        self._rarely = RateLimitedLog(_log, clock)

    def ended(self, ended: EndedRequest) -> None:
        """Log the request if it was drawn, or ended with an error of the router."""
        is_drawn = self._is_drawn(ended.route)
        event = "request_ended"
        if ended.refusal is not None:
            event = "request_refused"
        elif ended.outcome == "failed":
            is_word = bool(ended.attempts) and ended.attempts[-1].status >= CLIENT_FAULT
            event = "request_refused" if is_word else "request_cut_off"
        elif not is_drawn:
            return
        if event == "request_ended":
            _log.info(event, **_fields(ended))
        elif is_drawn:
            _log.warning(event, **_fields(ended))
        else:
            self._rarely.warning(event, key=_reason(ended), **_fields(ended))

    def refused(self, refusal: Refusal) -> None:
        """Log that a request was refused before it was read."""
        fields = _refused(refusal)
        if self._ratio >= 1:
            _log.warning("request_refused", **fields)
        else:
            self._rarely.warning("request_refused", key=fields["reason"], **fields)

    def _is_drawn(self, route: RouteRequest | None) -> bool:
        if route is None:
            return self._ratio >= 1
        return xxh3_64_intdigest(route.request_id.encode()) < self._ratio * _HASHES


def _fields(ended: EndedRequest) -> dict[str, Any]:
    """Return the line's fields; unknown ones are left out."""
    last = ended.attempts[-1] if ended.attempts else None
    known = {
        "outcome": ended.outcome,
        **_of_route(ended.route),
        "trace_id": ended.trace_id,
        **({} if last is None else _of_attempt(last, ended.usage)),
        "ttft_ms": _milliseconds(_ttft_s(ended.attempts)),
        "e2e_ms": _milliseconds(ended.e2e_s),
        "mode": ended.mode,
        "phases": [f"{each.verdict.request.phase} {each.verdict.winner}" for each in ended.attempts],
        "retries": sum(bool(each.reason) for each in ended.attempts[:-1]) - _migrations(ended),
        "migrations": _migrations(ended),
        "body_bytes": ended.body_bytes,
        "reason": _reason(ended),
        **({} if ended.refusal is None else _refused(ended.refusal)),
    }
    return {name: value for name, value in known.items() if value not in (None, "", [])}


def _of_route(route: RouteRequest | None) -> dict[str, Any]:
    if route is None:
        return {}
    return {
        "request_id": route.request_id,
        "decision_id": route.decision_id,
        "model": route.model,
        "tenant": route.tenant,
        "isl_tokens": route.isl_tokens,
    }


def _of_attempt(attempt: RankAttempt, usage: Usage) -> dict[str, Any]:
    verdict = attempt.verdict
    return {
        "decision_id": verdict.decision_id,
        "status": attempt.status or None,
        "worker": verdict.winner.worker_id,
        "rank": verdict.winner.dp_rank,
        "trust": verdict.trust,
        "overlap_tokens": verdict.overlap_blocks * verdict.request.block_size,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "itl_ms": _milliseconds(attempt.lease.itl_s),
    }


def _ttft_s(attempts: tuple[RankAttempt, ...]) -> float | None:
    """Return the time from the first decision to the client's first token; None if unknown."""
    for each in attempts:
        if each.lease.ttft_s is not None and (each.verdict.request.phase != "prefill" or len(attempts) == 1):
            return each.lease.ttft_s + each.verdict.now_s - attempts[0].verdict.now_s
    return None


def _migrations(ended: EndedRequest) -> int:
    return 0 if ended.plan is None else ended.plan.migrations


def _reason(ended: EndedRequest) -> str:
    """Return why the request ended, in the router's words; empty if it was answered."""
    if ended.refusal is not None:
        return str(_refused(ended.refusal)["reason"])
    last = ended.attempts[-1] if ended.attempts else None
    return "" if last is None or not last.reason else last.phase


def _refused(refusal: Refusal) -> dict[str, Any]:
    fields = {"status": refusal.status, "reason": refusal.code or refusal.kind}
    param = _NAME.match(refusal.param or "")
    return fields | ({"param": param[0]} if param is not None and param[0] in _FIELDS else {})


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
