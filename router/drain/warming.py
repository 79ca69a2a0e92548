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
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.inbound import COMPLETIONS
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import first_plan
from router.decision.verdict import Verdict
from router.http.buffered_response import BufferedResponse
from router.http.exchange import Exchange, OutboundCall
from router.http.refusals import Refusal, RequestRejected, unavailable
from router.http.upstreams import Upstreams
from router.prompt.chains import EncodedPrompt, RecentPrompt
from router.request.attempt import RankAttempt
from router.request.destination import Destination, RequestRecords
from router.request.request import Request
from router.request.serving import FleetRequest, Serving

_GIVEN_UP = "local: given up: it took too long, or the router stops"


class Wish(NamedTuple):
    """A prompt to be computed, as a request of its own: its routing fields, and its body for a worker."""

    route: RouteRequest
    body: bytes
    prompt: EncodedPrompt


def wish_of(recent: RecentPrompt, blocks: int, route: RouteRequest) -> Wish:
    """Return the first `blocks` blocks of a prompt as a request; `route` has its id and the excluded ranks."""
    prompt = recent.prompt.beginning(blocks)
    fields = {
        "model": recent.model,
        "prompt": unpack_tokens(prompt.ids),
        "max_tokens": 1 if route.phase == "whole" else 2,
        **({"cache_salt": recent.salt} if recent.salt else {}),
    }
    body = msgspec.json.encode(fields)
    return Wish(replace(route, isl_tokens=prompt.token_count, sequence_hashes=prompt.sequence_hashes), body, prompt)


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
        client = BufferedResponse(self._upstreams)
        exchange = Exchange(client, "POST", COMPLETIONS, "", {}, wish.body, 0.0)
        cache = _Cache(wish, verdict, self._serving, self.decide)
        request = Request(exchange, cache, cache, verdict.policy)
        request.run(request.live())
        try:
            async with asyncio.timeout(within_s):
                await cache.over.wait()
        except TimeoutError:
            pass  # `finally` gives it up
        finally:
            exchange.leave()
        return cache.fault


class _Cache(Destination[RankAttempt], RequestRecords[RankAttempt]):
    """Where one prompt goes; `over` is set at its end."""

    __slots__ = ("_decide", "_serving", "_verdict", "_wish", "fault", "over")

    def __init__(
        self, wish: Wish, verdict: Verdict, serving: Serving, decide: Callable[[RouteRequest], Verdict | None]
    ) -> None:
        """`verdict` is the decision for the first worker; `decide` chooses the one that fetches its KV."""
        self._wish, self._serving, self._decide = wish, serving, decide
        self._verdict: Verdict | None = verdict
        self.over = asyncio.Event()
        self.fault = _GIVEN_UP
        """Why the first worker did not compute the prompt; empty if it did."""

    async def read(self, request: FleetRequest) -> None:
        """Set the wish's body, prompt and route, and a plan with one try at each phase."""
        exchange, wish = request.exchange, self._wish
        read = await request.later(self._serving.bodies.read(exchange.path, exchange.body))
        request.body, request.inbound = read
        request.prompt, request.route, request.first_route = wish.prompt, wish.route, wish.route
        request.plan = first_plan(wish.route.phase, retry_limit=0, falls_back=False)

    def routed(self, request: FleetRequest, pinned: str | None = None) -> None:
        """Set the route to the decode worker."""
        self._serving.routed(request, pinned)

    def choose(self, request: FleetRequest) -> RankAttempt:
        """Book the work at the first worker, or at one that fetches its KV; raise `RequestRejected`."""
        verdict, self._verdict = self._verdict or self._decide(request.route), None
        if verdict is None:
            raise RequestRejected(unavailable("no rank is eligible", "no_eligible_worker"))
        attempt = RankAttempt(verdict)
        attempt.lease = self._serving.routing.take(verdict)
        return attempt

    def call(self, request: FleetRequest, attempt: RankAttempt) -> OutboundCall:
        """Return the call to the worker."""
        return self._serving.call(request, attempt)

    def began(self, request: FleetRequest, attempt: RankAttempt) -> None:  # noqa: ARG002
        """The worker computed the prompt."""
        attempt.lease.first_token()

    def settle(self, request: FleetRequest, attempt: RankAttempt, outcome: OutcomeName) -> None:
        """A worker's part is over, as of any request."""
        self._serving.records.settle(request, attempt, outcome)
        if attempt.verdict.request.phase != "decode" and outcome != "cancelled":
            self.fault = "" if attempt.is_success else f"status {attempt.status}"
            if attempt.reason:
                self.fault = f"{attempt.stage}: {attempt.reason}"

    def ended(self, request: FleetRequest, outcome: OutcomeName, refusal: Refusal | None) -> None:  # noqa: ARG002
        """The prompt is computed, or will not be."""
        self.over.set()
