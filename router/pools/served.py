"""One request to pools, from the client's bytes to the end of its answer.

    agg      read -> planned -> forwarded
             likewise in disagg where one token is all: to the decode pool
    disagg   read -> planned -> prefill, collected -> decode, forwarded
                                     `- whole after its first token: answered with that

Each phase asks its own pools in turn (`leg.py`). What a prefill pool refuses, the client gets. The prefill answer goes
on to the decode pool as TensorRT-LLM's servers pass it on (`router.request.handoff.py`).

| header of the answer | says |
|---|---|
| `x-request-id` | the client's, or a new one |
| `x-pool`, `x-prefill-pool` | the namespaces of the pools that served it; of a final prefill answer the latter alone |
"""

import structlog

from kv_protocol.body_limits import Bytes
from router.pools.leg import Ended, Outbound, PoolPhaseRun, pool_failed
from router.pools.metrics import AttemptOutcome
from router.pools.reader import PoolRequestReader
from router.pools.service import PoolService, sent_on
from router.request.handoff import (
    CONTEXT_AND_GENERATION,
    AnswerUnusable,
    as_events,
    decode_body,
    prefill_answer,
    prefill_body,
)
from router.request.refusals import Refusal
from router.server.buffered_response import BufferedResponse
from router.server.exchange import Exchange, HeaderLines

ANSWER_BYTES_MAX = 4 << 20
"""Of a prefill pool's answer: text of one token, and the engine's handoff."""
_OK = 200
_log = structlog.get_logger("pools")


class PoolServed(PoolRequestReader):
    """One request. `begin` starts it; it is counted until it is over."""

    __slots__ = ("_prefill",)

    def __init__(self, exchange: Exchange, service: PoolService) -> None:
        super().__init__(exchange, service)
        self._prefill: BufferedResponse | None = None

    def begin(self) -> None:
        """Start the request."""
        self.exchange.on_gone(self._left)
        self.read()

    def _on_parsed(self) -> None:
        if len(self.plans) > 1:
            self._ask_prefill()
        elif self.service.config.mode == "agg":
            self._forward(self.body.text, b"")
        else:
            self._forward(decode_body(self.body.text, CONTEXT_AND_GENERATION), b"")

    @property
    def _request_id(self) -> bytes:
        return self.question.request_id.encode()

    def _forward(self, text: Bytes, lines: bytes) -> None:
        """Run the last phase: the client gets its answer."""

        def with_pool(namespace: str) -> bytes:
            return b"%bx-request-id: %b\r\nx-pool: %b\r\n" % (lines, self._request_id, namespace.encode())

        headers = sent_on(self.exchange.headers, self.question.request_id)
        outbound = Outbound(self.inbound.path, headers, self._sent(text), streamed=bool(self.inbound.stream))
        PoolPhaseRun(self.service, self.plans[-1], outbound, self.exchange.forward, with_pool, self._forwarded).begin()

    def _sent(self, text: Bytes) -> bytes | tuple[Bytes | memoryview, ...]:
        return text if isinstance(text, bytes) and not self.body.images else self.body.with_images(text)

    def _forwarded(self, ended: Ended) -> None:
        if ended.refusal is not None:
            self._refuse(ended.refusal)
        else:
            self._end(ended.outcome)

    # ------------------------------------------------------------------------------------------- prefill before it

    def _ask_prefill(self) -> None:
        prefill = self._prefill = BufferedResponse(self.service.upstreams, ANSWER_BYTES_MAX)
        headers = sent_on(self.exchange.headers, self.question.request_id, to_prefill=True)
        outbound = Outbound(self.inbound.path, headers, self._sent(prefill_body(self.body.text)), streamed=False)
        PoolPhaseRun(self.service, self.plans[0], outbound, prefill.ask, lambda _: b"", self._prefilled).begin()

    def _prefilled(self, ended: Ended) -> None:
        prefill, self._prefill = self._prefill, None
        if not self._over and prefill is not None:
            self._refusing(lambda: self._go_on_from(ended, prefill.body))

    def _go_on_from(self, ended: Ended, body: bytes) -> None:
        pool = ended.namespace
        if ended.refusal is not None:
            self._refuse(ended.refusal)
        elif ended.status != _OK or ended.outcome != "ok":
            self._refuse_as(ended, body)
        else:
            try:
                answer = prefill_answer(body, limit_tokens=self.inbound.limit_tokens)
            except AnswerUnusable as error:
                _log.warning("prefill_unusable", pool=pool, reason=str(error))
                self._refuse(pool_failed(pool, str(error)))
                return
            if answer.is_final:
                self._answer_final(answer.body, pool)
            else:
                lines = b"x-prefill-pool: %b\r\n" % pool.encode()
                self._forward(decode_body(self.body.text, answer.params, answer.prompt_ids), lines)

    def _refuse_as(self, ended: Ended, body: bytes) -> None:
        """Answer the client with the prefill pool's refusal, or, if that is incomplete, with an error."""
        if ended.outcome == "cancelled" or ended.status <= _OK:
            reason = f"its answer was cut, or has more than {ANSWER_BYTES_MAX} bytes"
            self._refuse(pool_failed(ended.namespace, reason))
            return
        self._end(ended.outcome)
        retry: HeaderLines = ((b"retry-after", ended.retry_after),) if ended.retry_after else ()
        self.exchange.answer(ended.status, body, headers=(*self._named(ended.namespace), *retry))

    def _answer_final(self, body: bytes, pool: str) -> None:
        self._end("ok")
        if self.inbound.stream:
            events = as_events(body, include_usage=self.inbound.include_usage)
            self.exchange.answer(_OK, events, content_type=b"text/event-stream", headers=self._named(pool))
        else:
            self.exchange.answer(_OK, body, headers=self._named(pool))

    def _named(self, prefill_pool: str) -> HeaderLines:
        return ((b"x-request-id", self._request_id), (b"x-prefill-pool", prefill_pool.encode()))

    # ------------------------------------------------------------------------------------------- the end

    def _refuse(self, refusal: Refusal) -> None:
        self._end("refused" if refusal.outcome == "refused" else "failed")
        named: HeaderLines = ((b"x-request-id", self._request_id),) if hasattr(self, "question") else ()
        self.exchange.answer(refusal.status, refusal.body, headers=(*refusal.headers, *named))

    def _left(self) -> None:
        """The client left while nothing was forwarded for it: drop the collected answer."""
        self._end("cancelled")
        if self._prefill is not None:
            self._prefill.give_up()

    def _end(self, outcome: AttemptOutcome) -> None:
        if not self._over:
            self.stop_reading()
            self.service.metrics.ended(outcome)
