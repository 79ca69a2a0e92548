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
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.inbound import COMPLETIONS
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.verdict import Verdict
from router.drain.recent_prompts import TOKEN_BYTES, RecentPrompt
from router.prompt import EncodedPrompt
from router.request.driver import RequestDriver
from router.request.events import (
    Admitted,
    AnswerBegan,
    AttemptOver,
    Chosen,
    Event,
    NotChosen,
    Parsed,
    Record,
    Relay,
    RequestOver,
    Send,
)
from router.request.plan import RequestPlan
from router.request.rank_attempt import RankAttempt, of_rank
from router.request.refusals import unavailable
from router.request.serving import Serving
from router.server.buffered_response import ASIDE_BYTES_MAX, BufferedResponse
from router.server.exchange import Exchange, OutboundCall
from router.server.heads import RequestHead
from router.server.stream_replay import StreamReplayBuffer
from router.server.upstream import Upstreams

_GIVEN_UP = "local: given up: it took too long, or the router stops"


class Wish(NamedTuple):
    """A prompt to be computed, as a request of its own: its routing fields, and its body for a worker."""

    route: RouteRequest
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
        request = WarmingRequest(wish, verdict, self._serving, self._upstreams, self.decide)
        request.begin()
        try:
            async with asyncio.timeout(within_s):
                await request.over.wait()
        except TimeoutError:
            pass  # `finally` gives it up
        finally:
            request.exchange.leave()
        return request.fault


class WarmingRequest(RequestDriver):
    """A prompt on its way to the cache; `over` is set at its end."""

    __slots__ = ("_decide_rank", "_plan", "_route", "_serving", "_verdict", "_wish", "fault", "over")

    def __init__(
        self,
        wish: Wish,
        verdict: Verdict,
        serving: Serving,
        upstreams: Upstreams,
        decide: Callable[[RouteRequest], Verdict | None],
    ) -> None:
        """`verdict` is the decision for the first worker; `decide` chooses the one that fetches its KV."""
        head = RequestHead("POST", COMPLETIONS, "", {}, 0, keep_alive=False, http_1_1=False)
        super().__init__(Exchange(BufferedResponse(upstreams, ASIDE_BYTES_MAX), head, wish.body, 0.0), serving.bodies)
        self._wish, self._serving, self._decide_rank = wish, serving, decide
        self._verdict: Verdict | None = verdict
        self._route = wish.route
        self._plan = RequestPlan(verdict.request.phase, retry_limit=0, falls_back=False)
        self.over = asyncio.Event()
        self.fault = _GIVEN_UP
        """Why the first worker did not compute the prompt; empty if it did."""

    def _ask_prompt(self, read_s: float) -> EncodedPrompt:  # noqa: ARG002 - no request of a client
        return self._wish.prompt

    def _on_read(self, prompt: EncodedPrompt | None, prompt_s: float) -> None:  # noqa: ARG002 - no request of a client
        self._feed(Parsed(self._plan, self.inbound, self._route.isl_tokens))

    def _queue(self) -> Event:
        return Admitted()

    def _make_route(self) -> None:
        if self._plan.phase == "decode":
            worker = self._serving.routing.state.fleet.worker(self._route.prefill_worker or "")
            self._route = replace(
                self._route,
                phase="decode",
                decision_id=self._serving.new_id(),
                tried=(),
                transfer_domain=None if worker is None else worker.registration.transfer_domain,
            )

    def _decide(self) -> Event:
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            verdict = self._decide_rank(self._route)
        if verdict is None:
            return NotChosen(unavailable("no rank is eligible", "no_eligible_worker"), None)
        serving = self._serving
        return Chosen(RankAttempt(verdict, serving.routing.take(verdict), serving.retry_after_s_max))

    def _call(self, send: Send, buffer: StreamReplayBuffer | None) -> OutboundCall | None:
        verdict = of_rank(send.attempt).verdict
        return self._serving.calls.call(
            verdict, self.inbound, self.body, {}, self._wish.prompt, send.handoff, send.progress, buffer
        )

    def _new_replay_buffer(self) -> StreamReplayBuffer:
        return self._serving.new_replay_buffer({})

    def _after_pause(self, retry: int, again: Callable[[], None]) -> None:
        self._serving.after_back_off(retry, self._route.decision_id, again)

    def _answer_lines(self, relay: Relay) -> bytes:  # noqa: ARG002 - the answer is dropped
        return b""

    def _refusal_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ()

    def on_bytes(self) -> None:
        """The answer goes on: renew its lease."""
        attempt = self._machine.attempt
        if attempt is not None:
            of_rank(attempt).lease.on_bytes()

    def _record(self, fact: Record) -> None:
        if isinstance(fact, AnswerBegan):
            of_rank(fact.attempt).lease.first_token()
        elif isinstance(fact, AttemptOver):
            attempt = of_rank(fact.attempt)
            self._serving.attempt_over(attempt, fact, (), {})
            if attempt.verdict.request.phase != "decode":
                self.fault = _fault(attempt, fact)
                self._route = replace(self._route, prefill_worker=attempt.rank.worker_id)
        elif isinstance(fact, RequestOver):
            self.stop_reading()
            self.over.set()


def _fault(attempt: RankAttempt, fact: AttemptOver) -> str:
    if fact.outcome == "cancelled":
        return _GIVEN_UP
    if attempt.reason:
        return f"{attempt.phase}: {attempt.reason}"
    return "" if attempt.is_answered else f"status {attempt.status}"
