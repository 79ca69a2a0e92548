"""Chooses the prefixes that a leaving worker hands over: those that only it holds, the hottest first; computes them.

    weight of a prompt    2 ** -(its age / `HALF_LIFE_S`)
    heat of a block       the sum of the weights of the prompts that have it
    exclusive             the worker's ranks hold the block on the GPU, and no other eligible rank does
    bought                the hottest blocks that the budget pays for: each costs `block_size` tokens
    selected              the newest prompts, with `BLOCKS_MAX` exclusive blocks at most; each counts once per prompt
    listed                the longest prefixes of bought blocks, one by one: next comes the prefix with the highest mean
                          heat of the blocks that are not listed yet

Every prompt with a block has all blocks before it, so heat never grows along a prefix: the hottest blocks (of equal
heat, the newest prompt's first) form complete prefixes, and no other choice of blocks has more heat for its tokens.

`compute` has a prompt computed only for the cache: a worker gets the request, and its answer is dropped.

| the worker's role | request | then |
|---|---|---|
| aggregated | one token | |
| prefill | two tokens, of which it makes the first | a decode worker fetches its KV, and makes the second |

A prefill worker keeps a prompt's blocks for a decode worker, so one has to fetch them; a failure to fetch does not
affect the result. Each worker is asked once. Leases and breakers work as for any request; the calls use the data
plane's connections.
"""

import asyncio
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import unpack_tokens
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.inbound import COMPLETIONS
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import RequestPlan
from router.decision.verdict import Verdict
from router.http.exchange import BufferedResponse, Exchange, OutboundCall
from router.http.refusals import Refusal, RequestRejected, unavailable
from router.http.upstreams import Upstreams
from router.prompt.chains import EncodedPrompt, RecentPrompt
from router.request.destination import Destination, RankAttempt
from router.request.request import Request
from router.request.serving import FleetRequest, Serving

HALF_LIFE_S = 300.0
"""A request five minutes ago counts half: users of a chat come back within minutes."""
BLOCKS_MAX = 1 << 17
"""Choosing from so many takes about 200 ms in a thread. At 32 tokens each they have 4M tokens; budgets are smaller."""
WarmingOutcome = Literal["warmed", "failed", "skipped"]
_GIVEN_UP = "local: given up: it took too long, or the router stops"


class PromptHolding(NamedTuple):
    """A requested prompt, and how many of its leading blocks lie on GPUs: at the worker, at the best other rank."""

    recent: RecentPrompt
    held_blocks: int
    elsewhere_blocks: int

    @property
    def exclusive(self) -> list[int]:
        """The hashes of the blocks after those that lie elsewhere, which only the worker holds."""
        hashes = memoryview(self.recent.prompt.sequence_hashes).cast("Q")
        return hashes[self.elsewhere_blocks : self.held_blocks].tolist()


class HotPrefix(msgspec.Struct, kw_only=True):
    """The first `blocks` blocks of a prompt, to be handed over, and its outcome, empty until it is known.

    `new_blocks` counts the blocks that only the leaving worker holds and that no prefix listed before has; `heat` is
    the sum of their heat. `worker` is chosen to compute the prefix; `reason` says why it did not.
    """

    model: str
    tokens: int
    blocks: int
    new_blocks: int
    heat: float
    held_blocks: int
    elsewhere_blocks: int
    outcome: WarmingOutcome | Literal[""] = ""
    worker: str = ""
    reason: str = ""


def hot_prefixes(
    prompts: Sequence[PromptHolding], now_s: float, *, block_size: int, budget_tokens: int
) -> list[tuple[RecentPrompt, HotPrefix]]:
    """Return the prefixes to hand over, in this order; their new blocks cost no more than the budget."""
    heat, selected, remaining = dict[int, float](), list[tuple[PromptHolding, list[int]]](), BLOCKS_MAX
    for prompt in sorted(prompts, key=lambda each: -each.recent.received_s):
        chain = prompt.exclusive
        if not 0 < len(chain) <= remaining:
            continue
        remaining -= len(chain)
        selected.append((prompt, chain))
        weight = 2.0 ** -(max(0.0, now_s - prompt.recent.received_s) / HALF_LIFE_S)
        for block in chain:
            heat[block] = heat.get(block, 0.0) + weight
    bought = set(sorted(heat, key=heat.__getitem__, reverse=True)[: budget_tokens // block_size])
    runs = [list(takewhile(bought.__contains__, chain)) for _, chain in selected]
    inner = {block for run in runs for block in run[:-1]}  # runs that end at these are parts of longer runs
    waiting = [(-fmean(map(heat.__getitem__, run)), at) for at, run in enumerate(runs) if run and run[-1] not in inner]
    heapify(waiting)
    found, listed = list[tuple[RecentPrompt, HotPrefix]](), set[int]()
    while waiting:
        believed, at = heappop(waiting)
        new = [block for block in runs[at] if block not in listed]
        if not new:
            continue
        if (value := -fmean(map(heat.__getitem__, new))) > believed:  # listed blocks were its hottest: it is worth less
            heappush(waiting, (value, at))
            continue
        listed.update(new)
        prompt, _ = selected[at]
        blocks = prompt.elsewhere_blocks + len(runs[at])
        prefix = HotPrefix(
            model=prompt.recent.model,
            tokens=blocks * block_size,
            blocks=blocks,
            new_blocks=len(new),
            heat=sum(heat[block] for block in new),
            held_blocks=prompt.held_blocks,
            elsewhere_blocks=prompt.elsewhere_blocks,
        )
        found.append((prompt.recent, prefix))
    return found


def decided(serving: Serving, route: RouteRequest) -> Verdict | None:
    """Return the decision of the policy in force; None if no rank is eligible."""
    try:
        return serving.routing.decide(route)
    except (NoEligibleWorker, WorkerNotNamed):
        return None


async def compute(
    serving: Serving,
    upstreams: Upstreams,
    recent: RecentPrompt,
    prompt: EncodedPrompt,
    verdict: Verdict,
    within_s: float,
) -> str:
    """Send `prompt`, the beginning of a recent one, to the winner of `verdict`, and await its answer.

    Return why it was not computed, empty if it was.
    """
    fields = {
        "model": recent.model,
        "prompt": unpack_tokens(prompt.ids),
        "max_tokens": 1 if verdict.request.phase == "whole" else 2,
        **({"cache_salt": recent.salt} if recent.salt else {}),
    }
    exchange = Exchange(BufferedResponse(upstreams), "POST", COMPLETIONS, "", {}, msgspec.json.encode(fields), 0.0)
    cache = _Cache(prompt, verdict, serving)
    request = Request(exchange, cache, verdict.policy)
    request.run(request.live())
    try:
        async with asyncio.timeout(within_s):
            await cache.over.wait()
    except TimeoutError:
        pass  # `finally` gives it up
    finally:
        exchange.leave()
    return cache.fault


class _Cache(Destination[RankAttempt]):
    """The destination of one prompt: the cache of the first worker; `over` is set at the request's end."""

    def __init__(self, prompt: EncodedPrompt, verdict: Verdict, serving: Serving) -> None:
        """`verdict` is the decision for the first worker."""
        self._prompt, self._verdict, self._serving = prompt, verdict, serving
        self.over = asyncio.Event()
        self.fault = _GIVEN_UP
        """Why the first worker did not compute the prompt; empty if it did."""

    async def read(self, request: FleetRequest) -> None:
        """Set body, prompt and route, and a plan with one try at each phase."""
        exchange, route = request.exchange, self._verdict.request
        read = await request.later(self._serving.bodies.read(exchange.path, exchange.body))
        request.body, request.inbound = read
        request.prompt, request.route, request.first_route = self._prompt, route, route
        request.plan = RequestPlan(route.phase, retry_limit=0, falls_back=False)

    def routed(self, request: FleetRequest, pinned: str | None = None) -> None:
        """Set the route to the decode worker."""
        self._serving.routed(request, pinned)

    def choose(self, request: FleetRequest) -> RankAttempt:
        """Book the work at the first worker, or at one that fetches its KV; raise `RequestRejected`."""
        is_first = request.route is self._verdict.request
        verdict = self._verdict if is_first else decided(self._serving, request.route)
        if verdict is None:
            raise RequestRejected(unavailable("no rank is eligible", "no_eligible_worker"))
        attempt = RankAttempt(verdict)
        attempt.lease = self._serving.routing.take(verdict)
        return attempt

    def call(self, request: FleetRequest, attempt: RankAttempt) -> OutboundCall:
        """Return the call to the worker."""
        return self._serving.call(request, attempt)

    def began(self, request: FleetRequest, attempt: RankAttempt) -> None:  # noqa: ARG002
        """The answer's first byte came, so the worker has computed the prompt."""
        attempt.lease.first_token()

    def settle(self, request: FleetRequest, attempt: RankAttempt, outcome: OutcomeName) -> None:
        """An attempt is over: record it as for any request, and set `fault`."""
        self._serving.settle(request, attempt, outcome)
        if attempt.verdict.request.phase != "decode" and outcome != "cancelled":
            self.fault = "" if attempt.is_success else f"status {attempt.status}"
            if attempt.reason:
                self.fault = f"{attempt.stage}: {attempt.reason}"

    def ended(self, request: FleetRequest, outcome: OutcomeName, refusal: Refusal | None) -> None:  # noqa: ARG002
        """Set `over`: the prompt is computed, or will not be."""
        self.over.set()
