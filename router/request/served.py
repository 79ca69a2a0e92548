"""A client's request at workers: what its machine's commands do in this router.

| command | effect |
|---|---|
| queue | admission (`router/queue/gate.py`) |
| decide | `Routing.decide`, for the phase of the plan; the work is booked at the winner (`Routing.take`) |
| send | the call that `calls.py` builds |
| record | leases, breakers, metrics, the request log |
"""

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from kv_protocol.decided import RouteRequest
from kv_protocol.openai.requests import ChatInbound
from router.decision.errors import NoEligibleWorker
from router.fleet.registry import SILENT_S
from router.prompt import EncodedPrompt
from router.request.driver import RequestDriver
from router.request.events import (
    Admitted,
    AnswerBegan,
    Answered,
    AttemptOver,
    Chosen,
    Event,
    GiveUp,
    NotChosen,
    Parsed,
    Record,
    Refused,
    Relay,
    RequestOver,
    Rerouted,
    Retried,
    Send,
    StreamLost,
    Unserved,
)
from router.request.plan import RequestPlan
from router.request.rank_attempt import RankAttempt, of_rank
from router.request.refusals import Refusal, RequestRejected
from router.request.request_log import EndedRequest
from router.request.resumption import CannotResume
from router.request.serving import Serving
from router.request.usage import NO_USAGE
from router.server.buffered_response import BufferedResponse
from router.server.exchange import Exchange, OutboundCall
from router.server.stream_replay import StreamReplayBuffer
from router.tracing.record import RequestEnd, is_error

if TYPE_CHECKING:
    import asyncio

    from kv_protocol.fleet import WorkerRegistered
    from kv_protocol.ids import WorkerRank
    from router.queue.gate import Ticket
    from router.request.attempt import Attempt


_ADMITTED = Admitted()


class Served(RequestDriver):
    """One request of a client. `begin` starts it."""

    __slots__ = (
        "_attempts",
        "_decided_s",
        "_erred_at",
        "_initial_route",
        "_mode",
        "_plan",
        "_prefill",
        "_prompt",
        "_stays",
        "_ticket",
        "_trace",
        "_usage",
        "route",
        "serving",
    )

    _plan: RequestPlan
    _initial_route: RouteRequest
    """The request as the client sent it; `route` is that of the phase."""
    route: RouteRequest
    _prompt: EncodedPrompt | None

    def __init__(self, exchange: Exchange, serving: Serving) -> None:
        super().__init__(exchange, serving.bodies)
        self.serving = serving
        self._mode = serving.routing.policy.mode
        self._ticket: Ticket | None = None
        self._attempts: tuple[RankAttempt, ...] = ()
        self._usage = NO_USAGE
        self._erred_at: tuple[WorkerRank, ...] = ()
        """Ranks that failed possibly by the request's fault."""
        self._decided_s: float | None = None
        """When it was first decided."""
        self._stays: Attempt | None = None
        """A lost worker's attempt whose stream, once it has begun, no other can resume."""
        self._prefill: WorkerRegistered | None = None
        """The worker that computed the prompt."""
        tracer = serving.tracer
        self._trace = None if tracer is None else tracer.begin(exchange.headers, exchange.began_s)

    # ------------------------------------------------------------------------------------------- until it is sent

    def _ask_prompt(self, read_s: float) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":
        self.serving.metrics.parsed(read_s)
        return self.serving.prompt_of(self.inbound, self.body)

    def _on_read(self, prompt: EncodedPrompt | None, prompt_s: float) -> None:
        serving, inbound = self.serving, self.inbound
        if prompt is not None:
            serving.metrics.tokenized(prompt_s)
            if self._trace is not None:
                self._trace.prompted(prompt_s)
        self._prompt = prompt
        route = self.route = self._initial_route = self._routed(prompt)
        plan = self._plan = self._planned(route)
        serving.placed(route, plan, inbound)
        self._feed(Parsed(plan, inbound, route.known_tokens))

    def _routed(self, prompt: EncodedPrompt | None) -> RouteRequest:
        return self.serving.route_request(self.inbound, self.exchange.headers, prompt)

    def _planned(self, route: RouteRequest) -> RequestPlan:
        return self.serving.plan(route, self.inbound)

    def _queue(self) -> Event | None:
        admission = self.serving.admission
        if admission.admits(self.route):
            return _ADMITTED
        self._ticket = admission.wait(self.route, self._admitted, self._turned_away)
        return None

    def _admitted(self) -> None:
        self._waited()
        self._feed_or_refuse(_ADMITTED)

    def _turned_away(self, refusal: Refusal) -> None:
        self._waited()
        self.serving.metrics.rejected(refusal.code or "")
        self._feed(Refused(refusal))

    def _waited(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.serving.metrics.queue_waited(ticket.waited_s)
            if self._trace is not None:
                self._trace.waited(ticket.waited_s)

    def _make_route(self) -> None:
        self.route = self.serving.route_of(self._initial_route, self._plan, self.inbound, self._prefill)

    def _decide(self) -> Event:
        trace = self._trace
        if trace is None:
            return self._decided()
        trace.deciding()
        event = self._decided()
        trace.decided(event)
        return event

    def _decided(self) -> Event:
        serving = self.serving
        try:
            verdict = serving.decide(self.route)
        except NoEligibleWorker as error:
            return NotChosen(serving.no_candidate(self.route, error), error.exclusions)
        except RequestRejected as refused:
            return NotChosen(refused.refusal, None)
        if self._decided_s is None:
            self._decided_s = verdict.now_s
            serving.record_prompt(self._initial_route, self.inbound, self._prompt)
        if isinstance(self.inbound, ChatInbound):
            serving.chat_sent(self.inbound, verdict.winner.worker_id)
        lease = serving.routing.take(verdict)
        serving.metrics.decided(verdict)
        return Chosen(RankAttempt(verdict, lease, serving.retry_after_s_max))

    def _call(self, send: Send, buffer: StreamReplayBuffer | None) -> OutboundCall | None:
        verdict, headers = of_rank(send.attempt).verdict, self.exchange.headers
        if self._trace is not None:
            headers = self._trace.sending(headers)
        call: OutboundCall | None = None
        try:
            call = self.serving.calls.call(
                verdict, self.inbound, self.body, headers, self._prompt, send.handoff, send.progress, buffer
            )
        finally:
            if call is None and self._trace is not None:
                self._trace.not_sent()
        return call

    def _new_replay_buffer(self) -> StreamReplayBuffer:
        return self.serving.new_replay_buffer(self.exchange.headers)

    def _after_pause(self, retry: int, again: Callable[[], None]) -> None:
        self.serving.after_back_off(retry, self.route.decision_id, again)

    def _let_fetch(self, command: GiveUp, aside: BufferedResponse) -> None:
        serving = self.serving
        headers = self.exchange.headers
        if self._trace is not None:
            headers = self._trace.beside(headers)
        try:
            verdict = serving.decide(self.route)
            call = serving.calls.call(
                verdict, self.inbound, self.body, headers, self._prompt, command.handoff, command.progress
            )
        except (NoEligibleWorker, RequestRejected, CannotResume):
            return
        if call is not None:
            aside.ask(call, self)
            aside.give_up()

    # ------------------------------------------------------------------------------------------- the answer

    def _answer_lines(self, relay: Relay) -> bytes:
        attempt = of_rank(relay.attempt)
        lines = self.serving.answer_headers(attempt.verdict, self.inbound, self._prompt)
        if attempt.reason:
            lines += f"x-kv-failure: {attempt.rank}: {attempt.reason}; no other worker is left\r\n".encode()
        prefilled_by = relay.prefilled_by
        if prefilled_by is not None:
            lines += b"x-prefill-instance-id: %b\r\n" % prefilled_by.rank.worker_id.encode()
        return lines

    def _refusal_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"x-request-id", self.route.request_id.encode()),) if hasattr(self, "route") else ()

    def _has_other(self) -> bool:
        attempt, plan = self._machine.attempt, self._plan
        if attempt is None or not plan.may_fail():
            return False
        return self.serving.has_other(attempt.rank, self._initial_route, plan, self.inbound, self._prefill)

    def on_bytes(self) -> None:
        """The answer goes on: renew its lease."""
        attempt = self._machine.attempt
        if attempt is not None:
            of_rank(attempt).lease.on_bytes()

    def lost(self, quiet_s: float, begun: bool) -> str:  # noqa: FBT001 - a callback's fact
        """Return why the worker's answer is not awaited: it is silent or left, and another one can serve the request.

        Of an answer that has begun, no byte came for as long as a worker may be silent, too.
        """
        attempt = self._machine.attempt
        if attempt is None or (begun and (quiet_s < SILENT_S or attempt is self._stays)):
            return ""
        reason = self.serving.lost(of_rank(attempt))
        if not reason:
            return ""
        if not self._machine.may_move(*self._replayed(), begun=begun):
            self._stays = attempt
            return ""
        routed = self._initial_route, self._plan, self.inbound, self._prefill
        return reason if self.serving.has_other(attempt.rank, *routed) else ""

    # ------------------------------------------------------------------------------------------- the records

    def _record(self, fact: Record) -> None:
        if type(fact) is AttemptOver:  # `isinstance` that is false takes 0.2 us for a Struct
            self._attempt_over(fact)
        elif type(fact) is AnswerBegan:
            attempt = of_rank(fact.attempt)
            attempt.lease.first_token()
            if self._trace is not None:
                self._trace.began()
            if fact.is_first_token:
                self._first_token(attempt, attempt.lease.first_byte_s)
            self.serving.admission.poke()
        elif type(fact) is Answered:
            attempt = of_rank(fact.attempt)
            if fact.is_first_token:
                self._first_token(attempt, attempt.lease.ttft_s)
            self.serving.settled(attempt, fact.usage)
        elif type(fact) is RequestOver:
            self._request_over(fact)
        else:
            self._count(fact)

    def _count(self, fact: Record) -> None:
        if isinstance(fact, Retried):
            self.serving.metrics.retried(fact.stage)
        elif isinstance(fact, Rerouted):
            self.serving.metrics.turned(fact.why)
        elif isinstance(fact, StreamLost):
            self.serving.metrics.stream_lost(fact.why)
        elif isinstance(fact, Unserved):
            self.serving.routing.refuse(self.route, fact.exclusions)

    def _first_token(self, attempt: RankAttempt, ttft_s: float | None) -> None:
        if ttft_s is not None and self._decided_s is not None:
            ttft_s += attempt.verdict.now_s - self._decided_s
            self.serving.metrics.first_token(self._mode, self.model, attempt.rank.worker_id, ttft_s)
            if self._trace is not None:
                self._trace.ttft_s = ttft_s

    def _attempt_over(self, fact: AttemptOver) -> None:
        attempt = of_rank(fact.attempt)
        self._attempts, self._usage = (*self._attempts, attempt), fact.usage
        self.serving.attempt_over(attempt, fact, self._erred_at, self._log_names() if attempt.reason else {})
        if self._trace is not None:
            self._trace.attempt_over(attempt, fact.outcome, fact.usage)
        if attempt.outcome == "erred":
            self._erred_at = (*self._erred_at, attempt.rank)
        elif fact.outcome == "ok" and attempt.verdict.request.phase == "prefill":
            worker = self.serving.routing.state.fleet.worker(attempt.rank.worker_id)
            self._prefill = None if worker is None else worker.registration

    def _request_over(self, fact: RequestOver) -> None:
        self.stop_reading()
        if self._ticket is not None:
            self._ticket.cancel()
        serving, e2e_s = self.serving, perf_counter() - self.exchange.began_s
        serving.ended(self.model, self._mode, fact.outcome, e2e_s)
        if serving.request_log.is_on or fact.refusal is not None or fact.outcome == "failed":
            serving.request_log.ended(
                EndedRequest(
                    self.route if hasattr(self, "route") else None,
                    self._plan if hasattr(self, "_plan") else None,
                    self._mode,
                    self._attempts,
                    self._usage,
                    fact.outcome,
                    fact.refusal,
                    e2e_s,
                    len(self.exchange.body),
                    self._trace_id(),
                )
            )
        trace = self._trace
        if trace is not None and trace.is_wanted(has_failed=is_error(fact.outcome, self._status(fact))):
            trace.send(self._request_end(fact))
            decision_id = self.route.decision_id if hasattr(self, "route") else ""
            serving.metrics.traced(self._mode, trace.hex_id, decision_id, e2e_s, trace.ttft_s)

    def _trace_id(self) -> str:
        return "" if self._trace is None else self._trace.hex_id

    def _log_names(self) -> dict[str, str]:
        names = {"trace_id": self._trace_id()}
        if hasattr(self, "route"):
            names["request_id"] = self.route.request_id
        return {name: value for name, value in names.items() if value}

    def _status(self, fact: RequestOver) -> int:
        """Return the status of the client's answer; 0: unknown, the client left."""
        if fact.outcome == "cancelled":
            return 0
        if fact.refusal is not None:
            return fact.refusal.status
        return self._attempts[-1].status if self._attempts else 0

    def _request_end(self, fact: RequestOver) -> RequestEnd:
        """Return what a trace says of the end."""
        refusal = fact.refusal
        last = self._attempts[-1] if self._attempts else None
        error = "" if refusal is None else refusal.code or refusal.kind
        if refusal is None and fact.outcome == "failed":
            error = "failed" if last is None else last.phase
        plan = self._plan if hasattr(self, "_plan") else None
        migrations = 0 if plan is None else plan.migrations
        return RequestEnd(
            self.route if hasattr(self, "route") else None,
            self.model,
            self.exchange.path,
            self._mode,
            fact.outcome,
            self._status(fact),
            error,
            self._usage,
            perf_counter(),
            retries=sum(bool(each.reason) for each in self._attempts[:-1]) - migrations,
            migrations=migrations,
        )
