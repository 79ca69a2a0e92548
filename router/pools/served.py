"""Sends requests to pools: to a router of a pool, for each phase in turn.

    agg      read -> pools selected -> forwarded
             likewise in disagg, for a request for one token: the decode pool serves it
    disagg   read -> pools selected -> prefill, collected -> decode, forwarded
                                             `- if this answer is complete after one token, the client gets it

| what happens | what this process does |
|---|---|
| a router cannot be reached, or is cut off or too slow before its answer | it tries the next router |
| a router answers with a status of 500 or more, or with a redirect | it tries the next router |
| the last router fails in one of these ways | it passes on that router's answer; if none, it answers 502 and why |
| a router answers anything else, a 4xx too | it passes on the answer |
| a router fails within its answer | it ends the request; for a prefill answer it tries the next router |
| the request exceeds a limit of this process | it answers 503, and counts no failure of the router |

Headers and body are read as the router reads them (`router/request/route_request.py`), and refused as it refuses them;
docs/POOLS.md says which of their fields select the pool.

The pools of a phase are tried in their order (`selection.py`). In each pool the routers that are up are tried, or all
if none is up. Source: `docs/SOURCES.md` D5.3. The prefill answer goes on to the decode pool as TensorRT-LLM's servers
pass it on (`router/request/handoff.py`).

| header of the answer | says |
|---|---|
| `x-request-id` | the client's, or a new one |
| `x-pool`, `x-prefill-pool` | the pools that served it; a final prefill answer has only `x-prefill-pool` |
"""

import math
import uuid
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog
from msgspec.structs import replace

from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_protocol.openai.requests import ChatInbound, CompletionInbound, Inbound, RequestInvalid
from router.config import RouterSettings
from router.decision.plan import RequestPlan
from router.decision.routing import Readiness
from router.http import refusals
from router.http.exchange import CallLimits, Exchange, OutboundCall
from router.http.heads import HOP_BY_HOP
from router.http.refusals import Refusal, RequestRejected
from router.pools.config import TOKEN_AXES, PoolGroup, PoolPhase
from router.pools.selection import PoolSequence, SelectionInput, Targets, plan, select
from router.pools.state import PoolStatus
from router.pools.watch import PoolWatch
from router.prompt.prompts import ModelPrompts
from router.request.destination import REDIRECTS, SERVER_FAULT, Attempt, Destination, Move
from router.request.handoff import CONTEXT_AND_GENERATION, decode_body, prefill_body
from router.request.reading import BodyParser
from router.request.replies import answer, refusal_of
from router.request.request import Request
from router.request.route_request import route_request

if TYPE_CHECKING:
    from kv_protocol.decided import RequestPhase

_NOT_SENT_ON = HOP_BY_HOP | {b"host", b"accept-encoding", b"content-type", b"expect", b"origin", b"x-request-id"}
"""Headers that routers do not get: they concern the client's connection, or this process drops or writes them."""
_OF_A_DECODE_WORKER = frozenset({b"x-worker-instance-id", b"x-dp-rank"})
"""Headers that name the decode worker: a prefill pool does not get them."""
_HASHING = Hashing(64)
"""`prompt` and `route_request` need a hashing; this process does not use the hashes."""
_MS_PER_S = 1000
_ID_BYTES = 4
IslOrigin = Literal["tokens", "estimate", "unread"]
_log = structlog.get_logger("pools")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The process's names, its models, and the targets of requests that state none."""

    models: tuple[str, ...]
    namespace: str = "dynamo"
    component_name: str = "global_router"
    defaults: Targets = Targets()


class PoolService:
    """Chooses pools and routers, and holds what all requests need."""

    def __init__(
        self, identity: Identity, settings: RouterSettings, watch: PoolWatch, prompts: ModelPrompts | None
    ) -> None:
        """`prompts` is None if there is no tokenizer: then lengths are estimated."""
        config = self.config = watch.config
        self.identity, self.pools, self.metrics = identity, watch.pools, watch.metrics
        self.prompts, self.bodies = prompts, BodyParser(settings.data.body_limits())
        self.route_request = partial(route_request, lambda: uuid.uuid4().hex)
        self.attempt_failed = watch.attempt_failed
        self._inflight_max = settings.queue.inflight_requests_max
        limits = settings.failures
        self.streamed = CallLimits(limits.first_byte_s, limits.between_bytes_s, limits.total_s)
        self.buffered = CallLimits(limits.whole_s, limits.between_bytes_s, limits.total_s)
        """The time limits for a router's answer."""
        self.reads_isl = any(axis.name in TOKEN_AXES for group in config.groups for axis in group.axes)
        """Whether any grid reads the prompt's length."""
        self._requests: Counter[str] = Counter()

    def serve(self, exchange: Exchange) -> None:
        """Serve a request, or refuse it for lack of capacity."""
        if self.metrics.inflight >= self._inflight_max:
            message = f"queue.inflight_requests_max: {self._inflight_max} requests are being served; try again"
            exchange.refuse(refusals.unavailable(message, "overloaded"))
            return
        self.metrics.inflight += 1
        pools = Pools(self)
        request = Request(exchange, pools)
        request.run(request.live())

    def explain(self, exchange: Exchange) -> None:
        """Answer with the pools that a request would be sent to, and why."""
        pools = Pools(self)
        request = Request(exchange, pools)
        exchange.when_gone = lambda _: request.stop()
        request.run(pools.explain(request))

    def plans(self, selection_input: SelectionInput, *, one_token: bool) -> tuple[PoolSequence, ...]:
        """Return the pools to try now, in order, for each phase in turn; for `one_token` only the last phase."""
        groups, defaults, retry = self.config.groups, self.identity.defaults, self.config.retry
        return tuple(
            plan(group, select(group, selection_input, defaults), self._statuses(group), retry=retry)
            for group in (groups[-1:] if one_token else groups)
        )

    def _statuses(self, group: PoolGroup) -> list[PoolStatus]:
        return [self.pools[name].status for name in group.namespaces]

    def readiness(self) -> Readiness:
        """Return whether requests can be served now; `reasons` names phases without a pool that is up, and why."""
        reasons = []
        for group in self.config.groups:
            statuses = self._statuses(group)
            if all(each.fitness == "down" for each in statuses):
                unfit = (f"{each.namespace}: {'; '.join(each.reasons)}" for each in statuses)
                reasons.append(f"no {group.phase} pool is up: {' | '.join(unfit)}")
        return Readiness(not reasons, reasons, [])

    def routers(self, namespace: str) -> tuple[str, ...]:
        """Return the routers of a pool that are up, or all if none is up; each call begins with the next router."""
        urls = self.pools[namespace].status.routers_up
        if not urls:
            urls = tuple(each.url for each in self.config.pools[namespace].routers)
        self._requests[namespace] += 1
        first = self._requests[namespace] % len(urls)
        return urls[first:] + urls[:first]


def _count_of_ids(inbound: Inbound) -> int | None:
    """Return how many token ids a request has; None if it has text."""
    given = inbound.token_data()
    if given is None and isinstance(inbound, CompletionInbound) and bytes(memoryview(inbound.prompt)[:1]) == b"[":
        with suppress(RequestInvalid):  # the worker refuses it
            read = inbound.read_prompts()
            given = b"".join([each for each in read if isinstance(each, bytes)])
    return len(given) // _ID_BYTES if given else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * _MS_PER_S


class PoolAttempt(Attempt):
    """A try at a router of a pool. `pool_phase` is the phase that its pool is for."""

    def __init__(self, namespace: str, url: str, pool_phase: PoolPhase) -> None:
        super().__init__(WorkerRank(namespace, 0))
        self.url, self.pool_phase = url, pool_phase

    @property
    def namespace(self) -> str:
        """The pool's namespace."""
        return self.rank.worker_id

    def judge(self, status: int) -> None:
        """Set what a status of 300 or more means; copy a prefill router's `Retry-After` to the client's answer."""
        self.is_success = False
        if self.pool_phase == "prefill" and (retry_after := self.headers.get(b"retry-after")):
            self.lines += b"retry-after: %b\r\n" % retry_after
        if status >= SERVER_FAULT or status in REDIRECTS:
            self.reason = f"status {status}"

    def refusal(self) -> Refusal:
        """Return 502: the last router that was tried failed."""
        message = f"pool {self.namespace} failed: {self.stage}: {self.reason}"
        return Refusal(502, message, code="upstream_failed", outcome="failed")


class Pools(Destination[PoolAttempt]):
    """The pools of one request."""

    __slots__ = ("_phase", "_question", "_routers", "_sequences", "_service")

    def __init__(self, service: PoolService) -> None:
        self._service = service
        self._question: dict[str, object] = {}
        """The inputs of the selection, which `explain` shows."""
        self._sequences: tuple[PoolSequence, ...] = ()
        """The pools of each phase."""
        self._phase = ""
        """The present phase."""
        self._routers: tuple[tuple[str, str], ...] = ()
        """The namespace and the URL of each router of the present phase, in the order in which they are tried."""

    # ------------------------------------------------------------------------------------------- until it is sent

    async def read(self, request: Request[PoolAttempt]) -> None:
        """Set the request's body, prompt and plan, and select the pools.

        The prompt is set if a grid reads its length, the request has text, and there is a tokenizer; else it is None.

        Raises:
            RequestInvalid, TextError, EncodersBusy, RequestRejected: pools do not serve the request.
        """
        service, exchange = self._service, request.exchange
        read = await request.later(service.bodies.read(exchange.path, exchange.body))
        request.body, request.inbound = read
        inbound = request.inbound
        request.model, request.prompt = inbound.model, None
        if inbound.endpoint not in DEFAULT_ENDPOINTS:
            raise RequestInvalid("input", inbound.endpoint, "messages or prompt: pools serve chats and completions")
        if inbound.model not in service.identity.models:
            raise RequestRejected(refusals.unknown_model(inbound.model, service.identity.models))
        isl_tokens, isl_origin = await self._isl(request)
        route = request.route = service.route_request(inbound, exchange.headers, _HASHING)
        given = (exchange.headers.get(b"x-request-priority"), inbound.priority, inbound.extension.hints.priority)
        targets = Targets(_ms(route.ttft_target_s), _ms(route.itl_target_s))
        asked = SelectionInput(isl_tokens, targets, None if given == (None, None, None) else route.priority)
        self._question = {
            "request_id": route.request_id, "model": inbound.model, "asked": asked, "isl_origin": isl_origin
        }  # fmt: skip
        self._sequences = service.plans(asked, one_token=inbound.limit_tokens == 1)
        phase: RequestPhase = "whole" if service.config.mode == "agg" else "alone"
        if len(self._sequences) > 1:
            phase = "prefill"
        request.plan = RequestPlan(phase, retry_limit=0, falls_back=False)
        self.routed(request)

    async def _isl(self, request: Request[PoolAttempt]) -> tuple[int | None, IslOrigin]:
        """Return the prompt's length, if it is read, and its origin; set the prompt if it has to be encoded."""
        service, inbound = self._service, request.inbound
        if not service.reads_isl:
            return None, "unread"
        if (count := _count_of_ids(inbound)) is not None:
            return count, "tokens"
        if service.prompts is not None:
            prompt = await request.later(service.prompts.prompt(request.body, inbound, _HASHING))
            request.prompt = prompt
            return prompt.token_count, "estimate" if prompt.unrendered else "tokens"
        assert isinstance(inbound, ChatInbound | CompletionInbound), "of one of two endpoints"
        text_bytes = len(inbound.messages if isinstance(inbound, ChatInbound) else inbound.prompt)
        return math.ceil(text_bytes / service.config.own.characters_per_token), "estimate"

    async def explain(self, request: Request[PoolAttempt]) -> None:
        """Answer with the inputs of the selection, and the pools of each phase."""
        try:
            await self.read(request)
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            request.exchange.refuse(refusal_of(error, request))
        else:
            answer(request.exchange, {"question": self._question, "phases": self._sequences})

    def routed(self, request: Request[PoolAttempt], pinned: str | None = None) -> None:  # noqa: ARG002 - no gateway
        """Find the routers of the plan's phase, unless they are already being tried."""
        if request.plan.phase != self._phase:
            self._phase, routers = request.plan.phase, self._service.routers
            order = self._sequence.order
            self._routers = tuple((pool.namespace, url) for pool in order for url in routers(pool.namespace))
            request.plan = replace(request.plan, retry_limit=len(self._routers) - 1)

    @property
    def _sequence(self) -> PoolSequence:
        """The pools of the present phase."""
        return self._sequences[0 if self._phase == "prefill" else -1]

    def choose(self, request: Request[PoolAttempt]) -> PoolAttempt:
        """Return a try at the next router."""
        plan = request.plan
        if not plan.retries:
            self._service.metrics.planned(self._sequence)
        return PoolAttempt(*self._routers[plan.retries], self._sequence.selection.phase)

    def call(self, request: Request[PoolAttempt], attempt: PoolAttempt) -> OutboundCall:
        """Return the call to the router."""
        text, body, handoff, to_prefill = request.body.text, request.body, request.handoff, self._phase == "prefill"
        if to_prefill:
            text = prefill_body(text)
        elif self._phase == "alone":
            text = decode_body(text, CONTEXT_AND_GENERATION)
        elif handoff is not None:
            text = decode_body(text, handoff.params, handoff.prompt_ids)
        sent = text if isinstance(text, bytes) and not body.images else body.with_images(text)
        left_out = _NOT_SENT_ON | _OF_A_DECODE_WORKER if to_prefill else _NOT_SENT_ON
        given = request.exchange.headers.items()
        lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in given if name not in left_out)
        own = b"content-type: application/json\r\nx-request-id: %b\r\n" % request.route.request_id.encode()
        streamed = request.inbound.stream and not to_prefill
        attempt.lines = self._lines(request, attempt)
        limits = self._service.streamed if streamed else self._service.buffered
        return OutboundCall(attempt.url, request.inbound.path, own + lines, sent, limits)

    def _lines(self, request: Request[PoolAttempt], attempt: PoolAttempt) -> bytes:
        """Return the header lines that say which pools served the request."""
        lines, pool = b"x-request-id: %b\r\n" % request.route.request_id.encode(), attempt.namespace.encode()
        if self._phase == "prefill":
            return b"%bx-prefill-pool: %b\r\n" % (lines, pool)
        if request.prefilled_by is not None:
            lines = b"x-prefill-pool: %b\r\n%b" % (request.prefilled_by.worker_id.encode(), lines)
        return b"%bx-pool: %b\r\n" % (lines, pool)

    # ------------------------------------------------------------------------------------------- the answer

    def reason_to_move(self, attempt: PoolAttempt, quiet_s: float, *, begun: bool) -> Move | None:  # noqa: ARG002
        """Return that the router is silent, if it is and its answer has not begun; else None."""
        is_silent = not begun and self._service.pools[attempt.namespace].is_silent(attempt.url)
        return Move("the router is silent", is_fault=True) if is_silent else None

    def settle(self, request: Request[PoolAttempt], attempt: PoolAttempt, outcome: OutcomeName) -> None:  # noqa: ARG002
        """An attempt is over: count it, and report its failure."""
        service, is_local = self._service, attempt.stage == "local"
        service.metrics.attempts[attempt.pool_phase, attempt.namespace, "cancelled" if is_local else outcome] += 1
        if is_local or not attempt.reason:
            return
        if attempt.stage == "connect":
            service.attempt_failed(attempt.namespace, attempt.url, attempt.reason)
        reason = f"{attempt.stage}: {attempt.reason}"
        _log.warning("pool_failed", phase=attempt.pool_phase, pool=attempt.namespace, url=attempt.url, reason=reason)

    def ended(
        self,
        request: Request[PoolAttempt],  # noqa: ARG002 - as of `Destination`
        outcome: OutcomeName,
        refusal: Refusal | None,  # noqa: ARG002
    ) -> None:
        """The request is over."""
        self._service.metrics.ended(outcome)
