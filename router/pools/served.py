"""A client's request to pools: what its machine's commands do in `router pools`.

    agg      read -> pools selected -> forwarded
             likewise in disagg where one token is all: to the decode pool
    disagg   read -> pools selected -> prefill, collected -> decode, forwarded
                                             `- complete after its first token: answered with that

Each phase tries its own pools in turn (`tries.py`). What a prefill pool refuses, the client gets. The prefill answer
goes on to the decode pool as TensorRT-LLM's servers pass it on (`router/request/handoff.py`).

| header of the answer | says |
|---|---|
| `x-request-id` | the client's, or a new one |
| `x-pool`, `x-prefill-pool` | the namespaces of the pools that served it; of a final prefill answer the latter alone |
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from router.pools.attempts import PoolSequence
from router.pools.reader import SelectionRequest, ask_prompt, selection_request
from router.pools.service import PoolService, sent_on
from router.pools.tries import PoolAttempt, PoolPhases, PoolRouter, of_pool
from router.prompt import EncodedPrompt
from router.request.driver import RequestDriver
from router.request.events import Admitted, AttemptOver, Chosen, Event, Parsed, Record, Relay, RequestOver, Send
from router.request.handoff import CONTEXT_AND_GENERATION, decode_body, prefill_body
from router.server.exchange import Exchange, OutboundCall
from router.server.stream_replay import StreamReplayBuffer

if TYPE_CHECKING:
    import asyncio

_log = structlog.get_logger("pools")


class PoolServed(RequestDriver):
    """One request. `begin` starts it; it is counted until it is over."""

    __slots__ = ("_begun", "_plan", "_question", "_sequences", "_service")

    _plan: PoolPhases
    _question: SelectionRequest
    _sequences: tuple[PoolSequence, ...]

    def __init__(self, exchange: Exchange, service: PoolService) -> None:
        super().__init__(exchange, service.bodies)
        self._service = service
        self._begun = ""
        """The phase whose routers are being tried."""

    # ------------------------------------------------------------------------------------------- until it is sent

    def _ask_prompt(self, read_s: float) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":  # noqa: ARG002
        return ask_prompt(self._service, self.inbound, self.body)

    def _on_read(self, prompt: EncodedPrompt | None, prompt_s: float) -> None:  # noqa: ARG002 - not counted
        service, inbound = self._service, self.inbound
        question = self._question = selection_request(service, inbound, self.exchange.headers, prompt)
        self._sequences = service.plans(question.asked, one_token=inbound.limit_tokens == 1)
        if len(self._sequences) > 1:
            plan = PoolPhases("prefill")
        else:
            plan = PoolPhases("whole" if service.config.mode == "agg" else "alone")
        self._plan = plan
        self._feed(Parsed(plan, inbound, 0))

    def _queue(self) -> Event:
        self._make_route()
        return Admitted()

    def _make_route(self) -> None:
        plan = self._plan
        if plan.phase != self._begun:
            self._begun = plan.phase
            sequence = self._sequence
            self._service.metrics.planned(sequence)
            routers = self._service.routers
            plan.begin(
                tuple(PoolRouter(pool.namespace, url) for pool in sequence.order for url in routers(pool.namespace))
            )

    @property
    def _sequence(self) -> PoolSequence:
        """The pools of the present phase."""
        return self._sequences[0 if self._plan.is_aside else -1]

    def _decide(self) -> Event:
        plan = self._plan
        return Chosen(PoolAttempt(plan.router, self._sequence.selection.phase, is_last=plan.is_last))

    def _call(self, send: Send, buffer: StreamReplayBuffer | None) -> OutboundCall:  # noqa: ARG002 - none is kept
        phase, text, handoff = self._plan.phase, self.body.text, send.handoff
        if phase == "prefill":
            text = prefill_body(text)
        elif phase == "alone":
            text = decode_body(text, CONTEXT_AND_GENERATION)
        elif handoff is not None:
            text = decode_body(text, handoff.params, handoff.prompt_ids)
        sent = text if isinstance(text, bytes) and not self.body.images else self.body.with_images(text)
        headers = sent_on(self.exchange.headers, self._question.request_id, to_prefill=send.is_aside)
        limits = self._service.call_limits(streamed=bool(self.inbound.stream) and not send.is_aside)
        return OutboundCall(of_pool(send.attempt).router.url, self.inbound.path, headers, sent, *limits)

    def _new_replay_buffer(self) -> StreamReplayBuffer:
        raise AssertionError("streams of pools are not resumed")

    def _after_pause(self, retry: int, again: Callable[[], None]) -> None:  # noqa: ARG002 - another router: no pause
        again()

    # ------------------------------------------------------------------------------------------- the answer

    def _answer_lines(self, relay: Relay) -> bytes:
        attempt, prefilled_by = of_pool(relay.attempt), relay.prefilled_by
        lines = b"x-request-id: %b\r\n" % self._question.request_id.encode()
        pool = attempt.router.namespace.encode()
        if relay.is_aside:
            retry = b"retry-after: %b\r\n" % attempt.retry_after if attempt.retry_after else b""
            return b"%bx-prefill-pool: %b\r\n%b" % (lines, pool, retry)
        if prefilled_by is not None:
            lines = b"x-prefill-pool: %b\r\n%b" % (of_pool(prefilled_by).router.namespace.encode(), lines)
        return b"%bx-pool: %b\r\n" % (lines, pool)

    def _refusal_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"x-request-id", self._question.request_id.encode()),) if hasattr(self, "_question") else ()

    def on_bytes(self) -> None:
        """The answer goes on."""

    def lost(self, quiet_s: float, begun: bool) -> str:  # noqa: ARG002, FBT001 - a callback's fact
        """Return why the router's answer is not awaited: it is silent, and another one may serve the request."""
        attempt = self._machine.attempt
        if begun or attempt is None or self._plan.is_last:
            return ""
        return "the router is silent" if self._service.live.is_silent(*of_pool(attempt).router) else ""

    def _record(self, fact: Record) -> None:
        if isinstance(fact, AttemptOver):
            self._attempt_over(fact)
        elif isinstance(fact, RequestOver):
            self.stop_reading()
            self._service.metrics.ended(fact.outcome)

    def _attempt_over(self, fact: AttemptOver) -> None:
        attempt, service = of_pool(fact.attempt), self._service
        namespace, url = attempt.router
        is_local = attempt.phase == "local"
        service.metrics.attempted(attempt.pool_phase, namespace, "cancelled" if is_local else fact.outcome)
        if is_local or not attempt.reason:
            return
        if attempt.phase == "connect":
            service.attempt_failed(namespace, url, attempt.reason)
        reason = f"{attempt.phase}: {attempt.reason}"
        _log.warning("pool_failed", phase=attempt.pool_phase, pool=namespace, url=url, reason=reason)
