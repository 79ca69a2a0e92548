"""Computes a prompt only for the cache: a worker gets the request, and its answer is dropped.

| the worker's role | request | then |
|---|---|---|
| aggregated | one token | |
| prefill | the prompt, with the first of two tokens | a decode worker fetches its KV, and makes the second |

A prefill worker keeps a prompt's blocks for a decode worker, so one has to fetch them; a failure to fetch does not
affect the result. Each worker is asked once. Leases and breakers work as for any request; the calls use the data
plane's connections.
"""

import asyncio
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kv_protocol.body_limits import Body
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.inbound import COMPLETIONS
from kv_protocol.openai.requests import Inbound, decode_inbound
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.verdict import Verdict
from router.decision.view import RouteRequest
from router.drain.recent_prompts import TOKEN_BYTES, RecentPrompt
from router.prompt import EncodedPrompt
from router.request.attempt import Attempt
from router.request.handoff import AnswerUnusable, PrefillAnswer, prefill_answer
from router.request.serving import Serving
from router.request.usage import usage_in
from router.server.buffered_response import BufferedResponse
from router.server.exchange import UpstreamStage
from router.server.heads import Headers
from router.server.upstream import Upstreams

_USAGE_BYTES = 4096
_ANSWER_BYTES_MAX = 4 << 20
"""Of a prefill worker's answer: its handoff may have a megabyte of state, in base64."""


class Wish(NamedTuple):
    """A prompt to be computed, as a request of its own: its routing fields, and its body for a worker."""

    route: RouteRequest
    inbound: Inbound
    body: bytes
    prompt: EncodedPrompt


def wish_of(recent: RecentPrompt, blocks: int, route: RouteRequest) -> Wish:
    """Return the first `blocks` blocks of a prompt as a request; `route` has its id and the excluded ranks."""
    ids, hashes = recent.ids_of(blocks), recent.hashes_of(blocks)
    count = len(ids) // TOKEN_BYTES
    fields = {
        "model": recent.model,
        "prompt": unpack_tokens(ids),
        "max_tokens": 1 if route.phase == "whole" else 2,
        **({"cache_salt": recent.salt} if recent.salt else {}),
    }
    body = msgspec.json.encode(fields)
    return Wish(
        replace(route, isl_tokens=count, sequence_hashes=hashes),
        decode_inbound(COMPLETIONS, body),
        body,
        EncodedPrompt(ids, count, recent.hashing, hashes),
    )


class Warming:
    """Has workers compute prompts."""

    def __init__(self, serving: Serving, upstreams: Upstreams) -> None:
        self._serving, self._upstreams = serving, upstreams

    def decide(self, route: RouteRequest) -> Verdict | None:
        """Return the decision of the policy in force; None if no rank is eligible."""
        try:
            return self._serving.routing.decide(route)
        except (NoEligibleWorker, WorkerNotNamed):
            return None

    async def compute(self, wish: Wish, verdict: Verdict, within_s: float) -> str:
        """Send the prompt to the winner and await its answer; return why it was not computed, empty if it was."""
        call = await self._ask(wish, verdict, None, within_s)
        if not call.fault and verdict.request.phase == "prefill":
            await self._let_fetch(wish, verdict, call.body, within_s)
        return call.fault

    async def _let_fetch(self, wish: Wish, verdict: Verdict, body: bytes, within_s: float) -> None:
        try:
            answer = prefill_answer(body, limit_tokens=None)
        except AnswerUnusable:
            return  # there is nothing to fetch
        worker = self._serving.routing.state.fleet.worker(verdict.winner.worker_id)
        if answer.is_final or worker is None:
            return
        route = replace(
            verdict.request,
            phase="decode",
            decision_id=self._serving.new_id(),
            tried=(),
            transfer_domain=worker.registration.transfer_domain,
            prefill_worker=worker.registration.worker_id,
        )
        decoder = self.decide(route)
        if decoder is not None:
            await self._ask(wish, decoder, answer, within_s)

    async def _ask(
        self, wish: Wish, verdict: Verdict, handoff: PrefillAnswer | None, within_s: float
    ) -> "_WarmingCall":
        serving = self._serving
        answer = BufferedResponse(self._upstreams, _ANSWER_BYTES_MAX)
        warming = _WarmingCall(Attempt(verdict, serving.routing.take(verdict)), answer, serving)
        call = serving.calls.call(verdict, wish.inbound, Body(wish.body), {}, wish.prompt, handoff)
        try:
            if call is None:
                warming.on_failed("connect", "the worker left", begun=False)
            else:
                answer.ask(call, warming)
            async with asyncio.timeout(within_s):
                await warming.over.wait()
        except TimeoutError:
            pass  # `finally` gives the call up
        finally:
            answer.give_up()
            warming.settle()
        return warming


class _WarmingCall:
    """A running call; `over` is set at its end, and then `settle` must be called."""

    __slots__ = ("_answer", "_attempt", "_serving", "over")

    def __init__(self, attempt: Attempt, answer: BufferedResponse, serving: Serving) -> None:
        self._attempt, self._answer, self._serving = attempt, answer, serving
        self.over = asyncio.Event()

    @property
    def fault(self) -> str:
        """Why the call failed; empty if it succeeded."""
        attempt = self._attempt
        if attempt.reason:
            return f"{attempt.phase}: {attempt.reason}"
        return "" if attempt.is_answered else f"status {attempt.status}"

    @property
    def body(self) -> bytes:
        """The answer's body, as far as it was received."""
        return self._answer.body

    def settle(self) -> None:
        """End the lease, and report the outcome to the worker's breaker."""
        attempt = self._attempt
        is_gone = attempt.phase == "local"
        if is_gone or self.fault:
            attempt.lease.end("cancelled" if is_gone else "failed")
        else:
            usage = usage_in(self.body[-_USAGE_BYTES:])
            attempt.lease.end(
                "ok",
                usage.cached_tokens,
                usage.output_tokens,
                came_whole=attempt.lease.first_byte_s is None,
                arrival=attempt.arrival((usage.output_tokens or 1) - 1),
            )
        self._serving.attempt_ended(attempt, is_gone=is_gone, erred_before=())

    # ------------------------------------------------------------ as the call's watcher

    def on_head(self, status: int, headers: Headers) -> bytes | None:
        """Return no additional lines; None if the answer is of no use."""
        return b"" if self._attempt.on_status(status, headers, self._serving.busy_s) else None

    def on_dropped(self) -> None:
        """The useless answer is dropped."""
        self.over.set()

    def on_first_byte(self) -> None:
        """The answer has begun: the prompt is computed."""
        self._attempt.lease.first_token()

    def on_bytes(self) -> None:
        """The answer goes on."""
        self._attempt.lease.on_bytes()

    def on_end(self, tail: bytes, later_events: int) -> None:  # noqa: ARG002 - it is gathered
        """The answer is complete."""
        self.over.set()

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:  # noqa: ARG002 - `on_failed` says it
        """Return None: the stream ends."""
        return None

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: ARG002, FBT001 - a callback's facts
        """The worker failed."""
        self._attempt.phase, self._attempt.reason = phase, reason
        self.over.set()

    def on_gone(self) -> None:
        """The call was given up, which says nothing of the worker."""
        self._attempt.phase, self._attempt.reason = "local", "given up: it took too long, or the router stops"
        self.over.set()
