"""What all requests on their way share: reading, deciding, and the words of calls and answers."""

import asyncio
import re
from collections.abc import Callable
from typing import NamedTuple

import structlog
from xxhash import xxh3_64_intdigest

from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptEnded
from kv_protocol.openai import Inbound
from kv_protocol.splitmix import unit_interval
from router import refusals
from router.admission import Admission
from router.asked import Asked
from router.attempt import Attempt
from router.config import RouterSettings
from router.core.eligibility import reason_kind
from router.core.errors import NoEligibleWorker, WorkerNotNamed
from router.core.tenants import TenantNames
from router.core.verdict import Verdict
from router.core.view import RouteRequest
from router.http.exchange import Exchange, OutboundCall
from router.http.heads import Headers
from router.metrics import RequestMetrics
from router.refusals import Refusal, Refused
from router.routing import Routing
from router.tokens import Prompt, Prompts, with_prompt_ids
from router.usage import Usage

_BACK_OFF_S = 0.02
"""Before the first retry, on average; twice as long before each that follows."""
_SECONDS = re.compile(rb"[0-9]{1,6}")
_BUSY_S = 1.0

_THE_CLIENTS_WORD = frozenset({"pinned", "taint", "lora"})
"""Why nobody may take a request that asks for what nobody is: its own fault, and not worth coming again for."""
_PASSED_ON = (b"traceparent", b"tracestate", b"x-session-id")
"""Headers of a client that workers get, too."""
_PASSED_ON_NAMES = frozenset(_PASSED_ON)

_RANKS_MAX = 4096
"""Ranks whose header lines are kept."""

_log = structlog.get_logger("router")


class _Model(NamedTuple):
    """What a name that requests use means, until the fleet changes, or time has changed who is fit."""

    hashing: Hashing
    lora: str
    fleet_changes: int
    valid_until_s: float


class Serving:
    """The parts that serve requests, and what is counted and recorded of each."""

    def __init__(
        self,
        routing: Routing,
        prompts: Prompts,
        admission: Admission,
        metrics: RequestMetrics,
        tenants: TenantNames,
        settings: RouterSettings,
        new_id: Callable[[], str],
    ) -> None:
        self.routing, self.admission, self.metrics = routing, admission, metrics
        self.new_id = new_id
        self.retry_limit = settings.failures.retry_limit
        self.inflight = 0
        self._inflight_max = settings.queue.inflight_requests_max
        self._prompts, self._tenants, self._settings = prompts, tenants, settings
        self._asked = Asked(new_id)
        limits = settings.failures
        self._limits = limits.connect_s, limits.first_byte_s, limits.between_bytes_s, limits.total_s
        self._whole_limits = limits.connect_s, limits.whole_s, limits.between_bytes_s, limits.total_s
        self._models: dict[str, _Model] = {}
        self._rank_lines: dict[WorkerRank, bytes] = {}
        self._worker_headers = _worker_headers(settings.data.worker_token.get_secret_value())

    def begin(self) -> Refusal | None:
        """A request to be served came; return why there is no room for it, if there is none. Else `ended` follows."""
        if self.inflight >= self._inflight_max:
            self.metrics.rejected("inflight_requests_max")
            message = f"queue.inflight_requests_max: {self.inflight} requests are being served; try again"
            return refusals.unavailable(message, "overloaded")
        self.inflight += 1
        self.metrics.begin()
        return None

    # ------------------------------------------------------------------------------------------- asking

    def prompt_of(self, inbound: Inbound) -> "Prompt | asyncio.Future[Prompt] | None":
        """Return the prompt, now or later; None where neither the mode nor the configuration wants it.

        Raises:
            RequestInvalid, TextError: there is none.
            Refused: nobody serves the model.
        """
        model, state = self._model(inbound.model), self.routing.state
        if not (state.modes[state.policy.mode].reads_overlap or self._settings.tokens.always):
            return None
        return self._prompts.prompt(inbound, model.hashing, model.lora)

    def route_request(self, inbound: Inbound, headers: Headers, prompt: Prompt | None) -> RouteRequest:
        """Return what routing reads of the request; raise `RequestInvalid`, `Refused`."""
        model = self._model(inbound.model)
        hashing = model.hashing if prompt is None else prompt.hashing
        tenant = self._tenants.name(headers.get)
        return self._asked.route_request(inbound, headers, hashing, prompt, lora=model.lora, tenant=tenant)

    def _model(self, name: str) -> _Model:
        fleet, now_s = self.routing.state.fleet, self.routing.clock.now()
        known = self._models.get(name)
        if known is not None and known.fleet_changes == fleet.changes and now_s < known.valid_until_s:
            return known
        hashing = fleet.hashing(name, now_s)
        if hashing is None:
            self._models.pop(name, None)
            raise Refused(refusals.unknown_model(name, fleet.models()))
        valid_until_s = fleet.valid_until_s(fleet.serving(name), now_s)
        known = self._models[name] = _Model(hashing, fleet.lora_of(name), fleet.changes, valid_until_s)
        return known

    # ------------------------------------------------------------------------------------------- deciding

    def decide(self, route: RouteRequest) -> Verdict:
        """Return who takes the request; raise `Refused` where nobody may."""
        routing = self.routing
        try:
            verdict = routing.decide(route)
        except WorkerNotNamed as error:
            raise Refused(refusals.invalid(str(error), error.field)) from error
        except NoEligibleWorker as error:
            routing.refuse(route, error)
            raise Refused(_nobody(error)) from error
        if not verdict.meets_targets:
            self._unmet(verdict)
        self.metrics.chosen(routing.match_s, routing.choose_s)
        return verdict

    def _unmet(self, verdict: Verdict) -> None:
        """Nobody is predicted to meet the request's targets: it goes on all the same, or is refused."""
        if verdict.action != "reject":
            self.metrics.fallback("unmet_target")
            return
        self.metrics.rejected("unmet_target")
        message = "nobody is predicted to meet the targets of nvext.router, or of policy.ttft_target_s and itl_target_s"
        raise Refused(refusals.unavailable(message, "unmet_target", outcome="refused"))

    # ------------------------------------------------------------------------------------------- forwarding

    def call_for(
        self, verdict: Verdict, inbound: Inbound, exchange: Exchange, prompt: Prompt | None
    ) -> OutboundCall | None:
        """Return what is sent to the winner; None where it left meanwhile."""
        worker = self.routing.state.fleet.worker(verdict.winner.worker_id)
        if worker is None:
            return None
        told, body = worker.registration, exchange.body
        limits = self._limits if inbound.stream else self._whole_limits
        headers = b"%bx-request-id: %b\r\n" % (self._worker_headers, verdict.request.request_id.encode())
        if not _PASSED_ON_NAMES.isdisjoint(exchange.headers):
            headers += _passed_on(exchange.headers)
        if not told.accepts_token_ids:
            return OutboundCall(told.base_url, inbound.path, headers, body, *limits)
        headers = b"%bx-dp-rank: %d\r\n" % (headers, verdict.winner.dp_rank)
        parts = body if prompt is None else with_prompt_ids(body, prompt.ids, prompt.encoded)
        return OutboundCall(told.base_url, inbound.path, headers, parts, *limits)

    def answer_headers(self, verdict: Verdict, inbound: Inbound) -> bytes:
        """Return the header lines by which the client learns how it was routed."""
        request = verdict.request
        lines = b"x-request-id: %b\r\nx-decision-id: %b\r\n%bx-overlap-blocks: %d\r\n" % (
            request.request_id.encode(),
            request.decision_id.encode(),
            self._rank_lines.get(verdict.winner) or self._lines_of(verdict.winner),
            verdict.overlap_blocks,
        )
        if ignored := inbound.ineffective:
            lines += f"x-ignored-parameters: {', '.join(ignored)}\r\n".encode()
        return lines

    def _lines_of(self, rank: WorkerRank) -> bytes:
        if len(self._rank_lines) >= _RANKS_MAX:
            self._rank_lines.clear()
        lines = f"x-worker-instance-id: {rank.worker_id}\r\nx-dp-rank: {rank.dp_rank}\r\n".encode()
        self._rank_lines[rank] = lines
        return lines

    def busy_s(self, retry_after: bytes) -> float:
        """Return how long a worker that is busy wants to be left alone."""
        wanted_s = float(retry_after) if _SECONDS.fullmatch(retry_after) else _BUSY_S
        return min(wanted_s, self._settings.failures.retry_after_s_max)

    def after_back_off(self, retry: int, decision_id: str, again: Callable[[], None]) -> None:
        """Call `again` after a pause that doubles with every retry, between half and one and a half of it."""
        jitter = 0.5 + unit_interval(xxh3_64_intdigest(decision_id.encode()))
        asyncio.get_running_loop().call_later(_BACK_OFF_S * 2 ** (retry - 1) * jitter, again)

    # ------------------------------------------------------------------------------------------- settling

    def ended(self, model: str, mode: str, outcome: str, duration_s: float) -> None:
        """A request is over."""
        self.inflight -= 1
        self.metrics.end(model, mode, outcome, duration_s)

    def attempt_ended(self, attempt: Attempt, *, is_gone: bool, erred_before: tuple[WorkerRank, ...]) -> None:
        """An attempt at a rank is over; its breaker, and whoever waits in the queue, learn of it."""
        outcome = "cancelled" if is_gone else attempt.outcome
        if outcome == "ok" and not erred_before and self.routing.state.breakers.are_all_closed:
            self.admission.poke()  # nothing is held against anybody, and nothing will be
            return
        rank = attempt.verdict.winner
        if outcome in ("failed", "erred"):
            _log.warning("worker_failed", worker=rank.worker_id, phase=attempt.phase, reason=attempt.reason)
            self.metrics.worker_failed(rank.worker_id, attempt.phase)
        self.routing.apply(
            AttemptEnded(
                now_s=self.routing.clock.now(),
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                outcome=outcome,
                phase=attempt.phase if attempt.reason else "",
                reason=attempt.reason,
                retry_after_s=attempt.retry_after_s,
                decision_id=attempt.verdict.request.decision_id,
                erred_before=erred_before if outcome == "ok" else (),
            )
        )
        self.admission.poke()

    def settled(self, attempt: Attempt, usage: Usage) -> None:
        """A request was answered."""
        verdict = attempt.verdict
        request = verdict.request
        decode_s, tokens = attempt.lease.decode_s, usage.output_tokens or 0
        itl_s = decode_s / (tokens - 1) if decode_s is not None and tokens > 1 else None
        self.metrics.finished(verdict.policy, request.isl_tokens, usage.output_tokens, itl_s)
        if usage.cached_tokens is not None and request.isl_tokens:
            predicted_tokens = verdict.overlap_blocks * request.block_size
            self.metrics.settled(verdict.winner.worker_id, predicted_tokens, usage.cached_tokens)


def _nobody(error: NoEligibleWorker) -> Refusal:
    kinds = {reason_kind(each.reason) for each in error.exclusions}
    if kinds == {"max_seq_len"}:
        return refusals.invalid(str(error), code="context_length_exceeded")
    if kinds and kinds <= _THE_CLIENTS_WORD:
        return refusals.invalid(str(error), code="no_such_worker")
    return refusals.unavailable(str(error), "no_eligible_worker")


def _passed_on(headers: Headers) -> bytes:
    return b"".join(b"%s: %s\r\n" % (name, headers[name]) for name in _PASSED_ON if name in headers)


def _worker_headers(token: str) -> bytes:
    lines = b"content-type: application/json\r\n"
    return lines + f"authorization: Bearer {token}\r\n".encode() if token else lines
