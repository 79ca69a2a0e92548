"""One request on its way from the client's bytes to the end of its answer.

    read -> prompt -> admitted -> decided -> forwarded -> settled

| where | may go wrong | then |
|---|---|---|
| read, prompt | the client's fault | 4xx that names the field |
| admitted | too much waits, or it waits too long | 429 or 503 with `Retry-After` |
| decided | nobody may take it | 503 that says for every rank why not; 400 where it is too long for everybody |
| forwarded | a worker fails before its answer, or is busy | another rank, `retry_limit` times; then 502, 503 |
| | it fails later | the stream ends with an error event |
| anywhere | the client leaves | all is free at once |

It is callbacks and not a task: a request that needs neither another thread nor its turn in the queue is sent on in the
turn of the loop in which it came.
"""

from time import perf_counter

from msgspec.structs import replace

from kv_protocol.ids import WorkerRank
from router import refusals
from router.admission import Ticket
from router.asking import Asking
from router.attempt import Attempt
from router.core.verdict import Verdict
from router.http.exchange import Exchange, Phase
from router.refusals import Refusal, Refused
from router.routing import OutcomeName
from router.serving import Serving
from router.usage import NOTHING_SAID, Usage, usage_in


class Served(Asking):
    """One request: `begin` starts it; it is the watcher of its own forwarding."""

    __slots__ = ("_attempt", "_erred_at", "_failed", "_mode", "_ticket")

    _ticket: Ticket | None
    _erred_at: tuple[WorkerRank, ...]

    def __init__(self, exchange: Exchange, serving: Serving) -> None:
        super().__init__(exchange, serving)
        self._mode = serving.routing.policy.mode
        self._ticket = None
        self._attempt: Attempt | None = None
        self._failed: Attempt | None = None
        self._erred_at = ()

    def begin(self) -> None:
        """The request is on its way."""
        self.exchange.on_gone(self._left)
        self.read()

    def _asked(self) -> None:
        self._ticket = self.serving.admission.ask(self.route, self._admitted, self._turned_away)

    def _admitted(self) -> None:
        if self._ticket is not None:
            self._waited()
        self._refusing(self._decide)

    def _turned_away(self, refusal: Refusal) -> None:
        self._waited()
        self.serving.metrics.rejected(refusal.code or "")
        self._refuse(refusal)

    def _waited(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.serving.metrics.queue_waited(ticket.waited_s)

    # ------------------------------------------------------------------------------------------- decided, forwarded

    def _decide(self) -> None:
        serving, route = self.serving, self.route
        try:
            verdict = serving.decide(route)
        except Refused as refused:
            self._refuse(refused.refusal if self._failed is None else _given_up(self._failed))
            return
        if self._failed is not None:
            serving.metrics.retried(self._failed.phase)
        self._attempt = Attempt(verdict, serving.routing.take(verdict))
        serving.metrics.decided(verdict)
        self._forward(verdict)

    def _forward(self, verdict: Verdict) -> None:
        call = self.serving.call_for(verdict, self.inbound, self.exchange, self.prompt)
        if call is None:
            self.on_failed("connect", "the worker left", begun=False)
        else:
            self.exchange.forward(call, self)

    def on_head(self, status: int, retry_after: bytes) -> bytes | None:
        """Return the header lines that say how it was routed; None where another rank is to be tried."""
        attempt = self._attempt
        assert attempt is not None
        if not attempt.heard(status, lambda: self.serving.busy_s(retry_after)):
            return None
        return self.serving.answer_headers(attempt.verdict, self.inbound)

    def on_dropped(self) -> None:
        """The answer that was not wanted is out of the way."""
        self._again()

    def on_first_byte(self) -> None:
        """The answer has begun."""
        attempt = self._attempt
        assert attempt is not None
        attempt.lease.first_token()
        self._begun(attempt)
        self.serving.admission.poke()

    def _begun(self, attempt: Attempt) -> None:
        ttft_s = attempt.lease.ttft_s
        if ttft_s is not None and attempt.is_answered:
            self.serving.metrics.first_token(self._mode, ttft_s)

    def on_bytes(self) -> None:
        """The answer goes on."""
        assert self._attempt is not None
        self._attempt.lease.on_bytes()

    def on_end(self, tail: bytes) -> None:
        """The client has the whole answer."""
        attempt = self._attempt
        assert attempt is not None
        is_ok = attempt.is_answered
        usage = usage_in(tail)
        came_whole = bool(tail) and attempt.lease.ttft_s is None
        self._end_attempt("ok" if is_ok else "refused", usage, came_whole=came_whole)
        if came_whole:
            self._begun(attempt)
        if is_ok:
            self.serving.settled(attempt, usage)
        self._end("ok" if is_ok else "refused")

    def on_failed(self, phase: Phase, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The worker failed; another is tried, unless the client has bytes of this one's answer."""
        attempt = self._attempt
        assert attempt is not None
        attempt.phase, attempt.reason = phase, reason
        if phase == "local":
            self._refuse(refusals.unavailable(reason, "overloaded"))
        elif begun:
            self._end_attempt("failed")
            self._end("failed")
        else:
            self._again()

    def _again(self) -> None:
        attempt, route, serving = self._attempt, self.route, self.serving
        assert attempt is not None
        rank = attempt.verdict.winner
        if attempt.outcome == "erred":
            self._erred_at = (*self._erred_at, rank)
        self._failed = attempt
        self._end_attempt("failed")
        if len(route.tried) >= serving.retry_limit:
            self._refuse(_given_up(attempt))
            return
        self.route = replace(route, tried=(*route.tried, rank), decision_id=serving.new_id())
        serving.after_back_off(len(route.tried), route.decision_id, self._retry)

    def _retry(self) -> None:
        if not self._over:
            self._refusing(self._decide)

    # ------------------------------------------------------------------------------------------- the end

    def on_gone(self) -> None:
        """The client left, and the worker's connection was closed."""
        self._left()

    def _left(self) -> None:
        if self._over:
            return
        if self._ticket is not None:
            self._ticket.cancel()
        self._end_attempt("cancelled")
        self._end("cancelled")

    def _refuse(self, refusal: Refusal) -> None:
        self._end_attempt("failed")
        self._end(refusal.outcome)
        named = self.route.request_id if hasattr(self, "route") else ""
        headers = (*refusal.headers, (b"x-request-id", named.encode())) if named else refusal.headers
        self.exchange.answer(refusal.status, refusal.body, headers=headers)

    def _end_attempt(self, outcome: OutcomeName, usage: Usage = NOTHING_SAID, *, came_whole: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.lease.end(outcome, usage.cached_tokens, usage.output_tokens, came_whole=came_whole)
        self.serving.attempt_ended(attempt, is_gone=outcome == "cancelled", erred_before=self._erred_at)

    def _end(self, outcome: str) -> None:
        self.stop_reading()
        self.serving.ended(self.model, self._mode, outcome, perf_counter() - self.exchange.began_s)


def _given_up(attempt: Attempt) -> Refusal:
    rank = attempt.verdict.winner
    if attempt.retry_after_s is not None:
        message = f"worker {rank} is busy, and so were the others: {attempt.phase}: {attempt.reason}"
        return refusals.unavailable(message, "overloaded", retry_after_s=attempt.retry_after_s)
    return refusals.worker_failed(rank, f"{attempt.phase}: {attempt.reason}")
