"""One request from the client's bytes to the end of its answer.

    read -> prompt -> admitted -> decided -> forwarded -> settled

| where | may go wrong | then |
|---|---|---|
| read, prompt | the client's fault | 4xx that names the field |
| admitted | too much waits, or it waits too long | 429 or 503 with `Retry-After` |
| decided | no worker is eligible | 503 with the reason for every rank; 400 if it is too long for all of them |
| forwarded | a worker fails before its answer, or is busy | another rank, `retry_limit` times; then 502, 503 |
| | it fails later | the stream ends with an error event |
| anywhere | the client leaves | its resources are released at once |

A request runs in callbacks, not in a task: one that needs neither another thread nor the queue is forwarded in the same
turn of the event loop in which it came.
"""

from time import perf_counter
from typing import TYPE_CHECKING

from kv_protocol.continuation import Progress, progress_of
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.inbound import CHAT
from router.decision.errors import NoEligibleWorker
from router.decision.routing import OutcomeName
from router.decision.verdict import Verdict
from router.decision.view import RouteRequest
from router.queue.gate import Ticket
from router.request import refusals
from router.request.attempt import Attempt
from router.request.handoff import AnswerUnusable, PrefillAnswer, as_events, prefill_answer
from router.request.latency import Arrival
from router.request.plan import RequestPlan
from router.request.reader import RequestReader
from router.request.refusals import Refusal, RequestRejected
from router.request.request_log import EndedRequest
from router.request.serving import Serving
from router.request.usage import NO_USAGE, Usage, usage_in
from router.server.buffered_response import BufferedResponse
from router.server.exchange import Exchange, OutboundCall, UpstreamStage
from router.server.heads import Headers

if TYPE_CHECKING:
    from kv_protocol.fleet import WorkerRegistered
    from router.server.stream_replay import StreamReplayBuffer

_PREFILL_BYTES_MAX = 4 << 20
"""Of a prefill worker's answer: its handoff may have a megabyte of state, in base64."""
_USAGE_BYTES = 4096


class Served(RequestReader):
    """One request. `begin` starts it; it is the handler of its own calls."""

    __slots__ = (
        "_aside",
        "_attempt",
        "_attempts",
        "_decided_s",
        "_erred_at",
        "_failed",
        "_handoff",
        "_initial_route",
        "_mode",
        "_plan",
        "_prefill",
        "_prefiller",
        "_progress",
        "_replay_buffer",
        "_retried",
        "_ticket",
        "_usage",
    )  # fmt: skip

    _plan: RequestPlan
    _initial_route: RouteRequest
    """The request as the client sent it; `route` is that of the phase."""
    _ticket: Ticket | None
    _erred_at: tuple[WorkerRank, ...]

    def __init__(self, exchange: Exchange, serving: Serving) -> None:
        super().__init__(exchange, serving)
        self._mode = serving.routing.policy.mode
        self._ticket = None
        self._attempt: Attempt | None = None
        self._attempts: tuple[Attempt, ...] = ()
        self._usage = NO_USAGE
        self._failed: Attempt | None = None
        self._retried: UpstreamStage | None = None
        self._erred_at = ()
        self._decided_s: float | None = None
        self._aside: BufferedResponse | None = None
        self._handoff: PrefillAnswer | None = None
        self._prefiller = b""
        self._prefill: WorkerRegistered | None = None
        """The worker that computed the prompt."""
        self._replay_buffer: StreamReplayBuffer | None = None
        self._progress: Progress | None = None

    def begin(self) -> None:
        """Start the request."""
        self.exchange.on_gone(self._left)
        self.read()

    def _on_parsed(self) -> None:
        self._initial_route = self.route
        self.serving.record_prompt(self.route, self.inbound, self.prompt)
        plan = self._plan = self.serving.plan(self.route, self.inbound)
        self.serving.placed(self.route, plan, self.inbound)
        if plan.phase != "whole":
            self.route = self.serving.route_of(self._initial_route, plan, self.inbound, None)
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
        serving, plan = self.serving, self._plan
        while True:
            try:
                verdict = serving.decide(self.route)
                break
            except NoEligibleWorker as error:
                if not plan.no_candidate():
                    refusal = serving.no_candidate(self.route, error)
                    self._refuse(refusal if self._failed is None else _given_up(self._failed))
                    return
                self._turned()
            except RequestRejected as refused:
                self._refuse(refused.refusal if self._failed is None else _given_up(self._failed))
                return
        if self._decided_s is None:
            self._decided_s = verdict.now_s
        if self._retried is not None:
            serving.metrics.retried(self._retried)
            self._retried = None
        self._attempt = Attempt(verdict, serving.routing.take(verdict))
        serving.metrics.decided(verdict)
        self._forward(verdict)

    def _turned(self) -> None:
        """The plan has been rerouted: decide again."""
        self.serving.metrics.turned(self._plan.reroutes[-1])
        self.route = self.serving.route_of(self._initial_route, self._plan, self.inbound, self._prefill)

    def _forward(self, verdict: Verdict) -> None:
        call = self._call(verdict)
        if call is None:
            self.on_failed("connect", "the worker left", begun=False)
        elif self._is_aside:
            aside = self._aside = BufferedResponse(self.exchange.outward, _PREFILL_BYTES_MAX)
            aside.ask(call, self)
        else:
            self.exchange.forward(call, self)

    def _call(self, verdict: Verdict) -> OutboundCall | None:
        may_migrate = self._plan.may_migrate() and not self._is_aside
        self._replay_buffer = (
            self.serving.new_replay_buffer(self.exchange.headers) if may_migrate or self.exchange.is_begun else None
        )
        return self.serving.calls.call(
            verdict,
            self.inbound,
            self.body,
            self.exchange.headers,
            self.prompt,
            self._handoff,
            self._progress,
            self._replay_buffer,
        )

    @property
    def _is_aside(self) -> bool:
        """Whether the answer is a prefill worker's, which a decode worker continues, and not the client's."""
        return self._plan.phase == "prefill" and not self._plan.is_fixed

    def on_head(self, status: int, headers: Headers) -> bytes | None:
        """Return the header lines that say how the request was routed; None if another rank is to be tried."""
        attempt = self._attempt
        assert attempt is not None
        if not attempt.on_status(status, headers, self.serving.busy_s):
            return None
        if self.exchange.is_begun and not attempt.is_answered:
            attempt.reason = f"status {status} to an answer that was to go on"
            return None
        return b"" if self._is_aside else self.serving.answer_headers(attempt.verdict, self.inbound) + self._prefiller

    def on_dropped(self) -> None:
        """The unwanted answer is dropped."""
        self._again()

    def on_first_byte(self) -> None:
        """The answer has begun."""
        attempt = self._attempt
        assert attempt is not None
        attempt.lease.first_token()
        if attempt.is_streamed and not self._is_aside:
            self._begun(attempt, attempt.lease.first_byte_s)
        self.serving.admission.poke()

    def _begun(self, attempt: Attempt, ttft_s: float | None) -> None:
        decided_s = self._decided_s
        if ttft_s is not None and decided_s is not None and attempt.is_answered and self._progress is None:
            self.serving.metrics.first_token(self._mode, ttft_s + attempt.verdict.now_s - decided_s)

    def on_bytes(self) -> None:
        """The answer goes on."""
        assert self._attempt is not None
        self._attempt.lease.on_bytes()

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The answer is complete, at the client, or in the router for a prefill worker's."""
        attempt = self._attempt
        assert attempt is not None
        if self._is_aside:
            self._collected(attempt)
            return
        is_ok = attempt.is_answered
        usage = usage_in(tail)
        came_whole = bool(tail) and attempt.lease.first_byte_s is None
        arrival = attempt.arrival(self._later_tokens(attempt, usage, later_events))
        self._end_attempt("ok" if is_ok else "refused", usage, came_whole=came_whole, arrival=arrival)
        if came_whole or not attempt.is_streamed:
            self._begun(attempt, attempt.lease.ttft_s)
        if is_ok:
            self.serving.settled(attempt, usage)
        self._end("ok" if is_ok else "refused")

    def _later_tokens(self, attempt: Attempt, usage: Usage, later_events: int) -> int:
        """Return how many tokens this worker's answer had behind its first; 0 if unknown."""
        if self.inbound.n not in (None, 1):
            return 0
        seen = later_events if self._replay_buffer is None else self._replay_buffer.later_tokens or later_events
        if usage.output_tokens is None or (attempt.is_streamed and not seen):
            return seen
        before = 0 if self._progress is None else self._progress.token_count
        return max(0, usage.output_tokens - before - 1)

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The worker failed. Another is tried, unless the client has part of this one's answer."""
        attempt = self._attempt
        if attempt is None:  # a call whose answer is not awaited
            return
        attempt.phase, attempt.reason = phase, reason
        if phase == "local":
            self._refuse(refusals.unavailable(reason, "overloaded"))
        elif begun and not self._is_aside:
            self._end_attempt("failed")
            self._end("failed")
        else:
            self._again()

    def _again(self) -> None:
        attempt, plan, serving = self._attempt, self._plan, self.serving
        assert attempt is not None
        rank = attempt.verdict.winner
        if attempt.outcome == "erred":
            self._erred_at = (*self._erred_at, rank)
        self._failed, self._retried = attempt, attempt.phase
        self._end_attempt("failed")
        reroutes = len(plan.reroutes)
        took_handoff = attempt.phase != "connect" and attempt.retry_after_s is None
        if not plan.failed(rank, took_handoff=took_handoff):
            self._refuse(_given_up(attempt))
            return
        if len(plan.reroutes) > reroutes:
            serving.metrics.turned(plan.reroutes[-1])
        self.route = serving.route_of(self._initial_route, plan, self.inbound, self._prefill)
        serving.after_back_off(max(1, plan.retries), self.route.decision_id, self._retry)

    def _retry(self) -> None:
        if not self._over:
            self._refusing(self._decide)

    # ------------------------------------------------------------------------------------------- from worker to worker

    def _collected(self, attempt: Attempt) -> None:
        """The prefill worker has answered, with the decode worker's parameters or with the complete answer."""
        aside = self._aside
        assert aside is not None
        body = aside.body
        limit_tokens = self.inbound.limit_tokens
        if limit_tokens is not None and self._progress is not None:
            limit_tokens -= self._progress.token_count
        try:
            answer = (
                PrefillAnswer(body, b"", is_final=True)
                if not attempt.is_answered
                else prefill_answer(body, limit_tokens=limit_tokens)
            )
        except AnswerUnusable as error:
            self.on_failed("body", str(error), begun=False)
            return
        usage = usage_in(body[-_USAGE_BYTES:])
        self._end_attempt("ok" if attempt.is_answered else "refused", usage, arrival=attempt.arrival(0))
        if answer.is_final:
            self._answer(attempt, answer.body, usage)
            return
        worker = self.serving.routing.state.fleet.worker(attempt.verdict.winner.worker_id)
        self._handoff = answer
        self._prefiller = b"x-prefill-instance-id: %b\r\n" % attempt.verdict.winner.worker_id.encode()
        self._prefill = None if worker is None else worker.registration
        self._plan.prefilled()
        self.route = self.serving.route_of(self._initial_route, self._plan, self.inbound, self._prefill)
        self._refusing(self._decide)

    def _answer(self, attempt: Attempt, body: bytes, usage: Usage) -> None:
        """Answer the client with a prefill worker's answer."""
        self._begun(attempt, attempt.lease.ttft_s)
        if attempt.is_answered:
            self.serving.settled(attempt, usage)
        self._end("ok" if attempt.is_answered else "refused")
        lines = self.serving.answer_headers(attempt.verdict, self.inbound)
        named = [line.partition(b": ") for line in lines.split(b"\r\n") if line]
        headers = [(name, value) for name, _, value in named]
        if not (self.inbound.stream and attempt.is_answered):
            self.exchange.answer(attempt.status, body, headers=headers)
            return
        events = as_events(body, include_usage=self.inbound.include_usage)
        if self.exchange.is_begun:
            self.exchange.end_stream(events)
        else:
            self.exchange.answer(200, events, content_type=b"text/event-stream", headers=headers)

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:
        """Return how the stream of a failed worker continues: from another worker, with its end, or with an error."""
        attempt, replay_buffer, plan = self._attempt, self._replay_buffer, self._plan
        if phase == "local" or attempt is None or replay_buffer is None or replay_buffer.is_overfull:
            return None
        had_begun = attempt.lease.first_byte_s is not None
        progress = progress_of(replay_buffer.events(), self._progress) if had_begun else self._progress
        if progress is None:
            return None
        attempt.phase, attempt.reason = phase, reason
        inbound, limit_tokens = self.inbound, self.inbound.limit_tokens
        if progress.finish_reason is not None or progress.token_count == limit_tokens:  # only the end is missing
            self._end_attempt("failed")
            self._end("ok")
            prompt_tokens = self.route.isl_tokens if inbound.include_usage else None
            return progress.ending(inbound.model, is_chat=inbound.path == CHAT, prompt_tokens=prompt_tokens)
        if not had_begun:
            self._again()
            return b""
        if not plan.may_migrate():
            return None
        self._progress = progress
        rank = attempt.verdict.winner
        self._failed = attempt
        self._end_attempt("failed")
        plan.migrated(rank)
        if plan.phase == "prefill" and limit_tokens == progress.token_count + 1:
            plan.compute_at_decode()  # as for requests for one token
        self._turned()
        self.serving.after_back_off(1, self.route.decision_id, self._retry)
        return b""

    # ------------------------------------------------------------------------------------------- the end

    def on_gone(self) -> None:
        """The client left and the worker's connection was closed; or a prefill worker's answer is too long."""
        if self._is_aside and not self._over:
            self.on_failed("body", f"an answer of more than {_PREFILL_BYTES_MAX} bytes", begun=False)
            return
        self._left()

    def _left(self) -> None:
        if self._over:
            return
        if self._ticket is not None:
            self._ticket.cancel()
        is_waiting = self._attempt is None
        self._end_attempt("cancelled")
        self._end("cancelled")
        if self._aside is not None:
            self._aside.give_up()
            if is_waiting and self._plan.phase == "decode":
                self._let_fetch(self._aside.another())

    def _let_fetch(self, aside: BufferedResponse) -> None:
        """Have a decode worker fetch the KV that a prefill worker holds for it; that answer is not read."""
        try:
            call = self._call(self.serving.decide(self.route))
        except (NoEligibleWorker, RequestRejected):
            return
        if call is not None:
            aside.ask(call, self)
            aside.give_up()

    def _refuse(self, refusal: Refusal) -> None:
        self._end_attempt("failed")
        self._end(refusal.outcome, refusal)
        named = self.route.request_id if hasattr(self, "route") else ""
        headers = (*refusal.headers, (b"x-request-id", named.encode())) if named else refusal.headers
        self.exchange.answer(refusal.status, refusal.body, headers=headers)

    def _end_attempt(
        self,
        outcome: OutcomeName,
        usage: Usage = NO_USAGE,
        *,
        came_whole: bool = False,
        arrival: Arrival | None = None,
    ) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        self._attempts, self._usage = (*self._attempts, attempt), usage
        arrival = arrival or Arrival(is_streamed=attempt.is_streamed, later_tokens=0)
        attempt.lease.end(outcome, usage.cached_tokens, usage.output_tokens, came_whole=came_whole, arrival=arrival)
        self.serving.attempt_ended(attempt, is_gone=outcome == "cancelled", erred_before=self._erred_at)

    def _end(self, outcome: str, refusal: Refusal | None = None) -> None:
        self.stop_reading()
        e2e_s = perf_counter() - self.exchange.began_s
        self.serving.ended(self.model, self._mode, outcome, e2e_s)
        if self.serving.request_log.is_on or refusal is not None or outcome == "failed":
            self._log(outcome, refusal, e2e_s)

    def _log(self, outcome: str, refusal: Refusal | None, e2e_s: float) -> None:
        self.serving.request_log.ended(
            EndedRequest(
                self.route if hasattr(self, "route") else None,
                self._plan if hasattr(self, "_plan") else None,
                self._mode,
                self._attempts,
                self._usage,
                outcome,
                refusal,
                e2e_s,
                len(self.exchange.body),
            )
        )


def _given_up(attempt: Attempt) -> Refusal:
    rank = attempt.verdict.winner
    if attempt.retry_after_s is not None:
        message = f"worker {rank} is busy, and so were the others: {attempt.phase}: {attempt.reason}"
        return refusals.unavailable(message, "overloaded", retry_after_s=attempt.retry_after_s)
    return refusals.worker_failed(rank, f"{attempt.phase}: {attempt.reason}")
