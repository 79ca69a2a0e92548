"""Which prefixes a leaving worker should hand over: those that only it holds, the hottest first.

    weight of a prompt    2 ** -(its age / `HALF_LIFE_S`)
    heat of a block       the sum of the weights of the prompts that have it
    exclusive             the worker's ranks hold the block on the GPU, and no other eligible rank does
    bought                the hottest blocks that the budget pays for: each costs `block_size` tokens
    selected              the newest prompts, as long as they have `BLOCKS_MAX` exclusive blocks, counted per prompt
    listed                the longest prefixes of bought blocks, by heat per token to compute; blocks of a prefix listed
                          before do not count again

Every prompt with a block has all blocks before it, so heat never grows along a prefix: the hottest blocks (of equal
heat, the newest prompt's first) form complete prefixes, and no other choice of blocks has more heat for its tokens.

`Warming` computes a prompt only for the cache: a worker gets the request, and its answer is dropped.

| the worker's role | request | then |
|---|---|---|
| aggregated | one token | |
| prefill | the prompt, with the first of two tokens | a decode worker fetches its KV, and makes the second |

A prefill worker keeps a prompt's blocks for a decode worker, so one has to fetch them; a failure to fetch does not
affect the result. Each worker is asked once. Leases and breakers work as for any request; the calls use the data
plane's connections.
"""

import asyncio
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import unpack_tokens
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.inbound import COMPLETIONS
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import first_plan
from router.decision.verdict import Verdict
from router.http.buffered_response import BufferedResponse
from router.http.exchange import Exchange, OutboundCall
from router.http.refusals import Refusal, RequestRejected, unavailable
from router.http.upstreams import Upstreams
from router.prompt.chains import BLOCK_BYTES, EncodedPrompt, RecentPrompt, block_count
from router.request.attempt import RankAttempt
from router.request.destination import Destination
from router.request.request import Request
from router.request.serving import FleetRequest, Serving

HALF_LIFE_S = 300.0
"""A request five minutes ago counts half: users of a chat come back within minutes."""
BLOCKS_MAX = 1 << 17
"""Some 50 ms; with blocks of 32 tokens 4 million tokens, and budgets are a fraction of that."""
_BlockNumbers = NDArray[np.intp]
_HASH = np.dtype("<u8")
_GIVEN_UP = "local: given up: it took too long, or the router stops"


class PromptHolding(NamedTuple):
    """A requested prompt, and how many of its leading blocks lie on GPUs: at the worker, at the best other rank."""

    recent: RecentPrompt
    held_blocks: int
    elsewhere_blocks: int

    @property
    def exclusive_blocks(self) -> int:
        """How many blocks behind those that lie elsewhere only the worker holds."""
        return min(self.held_blocks, block_count(self.recent.prompt.sequence_hashes)) - self.elsewhere_blocks


class HotPrefix(NamedTuple):
    """The first `blocks` blocks of a prompt.

    `new_blocks` of them are held only by the worker, and in no prefix listed before; `heat` is theirs.
    """

    holding: PromptHolding
    blocks: int
    new_blocks: int
    heat: float


def hot_prefixes(
    prompts: Sequence[PromptHolding],
    now_s: float,
    *,
    block_size: int,
    budget_tokens: int,
) -> list[HotPrefix]:
    """Return the prefixes to hand over, in this order; their new blocks cost no more than the budget."""
    selected = _looked_at(prompts)
    if not selected:
        return []
    lengths = [each.exclusive_blocks for each in selected]
    weights = [2.0 ** -(max(0.0, now_s - each.recent.received_s) / HALF_LIFE_S) for each in selected]
    hashes = np.concatenate([_exclusive_hashes(each) for each in selected])
    _, first, block_numbers = np.unique(hashes, return_index=True, return_inverse=True)
    heat = np.bincount(block_numbers, weights=np.repeat(weights, lengths)).astype(np.float64)
    is_bought = np.zeros(len(heat), dtype=np.bool_)
    is_bought[np.lexsort((first, -heat))[: budget_tokens // block_size]] = True
    runs = [_leading(of_one, is_bought) for of_one in np.split(block_numbers, np.cumsum(lengths)[:-1])]
    return [
        HotPrefix(selected[at], selected[at].elsewhere_blocks + len(runs[at]), len(new), float(heat[new].sum()))
        for at, new in _by_value(_longest(runs, len(heat)), heat)
    ]


def _looked_at(prompts: Sequence[PromptHolding]) -> list[PromptHolding]:
    """Return the prompts with blocks that only the worker holds, newest first, within `BLOCKS_MAX`."""
    selected, remaining = list[PromptHolding](), BLOCKS_MAX
    for each in sorted(prompts, key=lambda each: -each.recent.received_s):
        if 0 < each.exclusive_blocks <= remaining:
            selected.append(each)
            remaining -= each.exclusive_blocks
    return selected


def _exclusive_hashes(holding: PromptHolding) -> NDArray[np.uint64]:
    hashes, offset = holding.recent.prompt.sequence_hashes, holding.elsewhere_blocks * BLOCK_BYTES
    return np.frombuffer(hashes, dtype=_HASH, count=holding.exclusive_blocks, offset=offset)


def _leading(block_numbers: _BlockNumbers, is_bought: NDArray[np.bool_]) -> _BlockNumbers:
    """Return the block numbers before the first one that is not bought."""
    bought = is_bought[block_numbers]
    return block_numbers if bought.all() else block_numbers[: int(bought.argmin())]


def _longest(runs: Sequence[_BlockNumbers], blocks: int) -> list[_BlockNumbers]:
    """Return the runs, with empty ones for those that are part of another: one request computes both."""
    goes_on = np.zeros(blocks, dtype=np.bool_)
    for run in runs:
        goes_on[run[:-1]] = True
    return [run[:0] if len(run) and goes_on[run[-1]] else run for run in runs]


def _by_value(runs: Sequence[_BlockNumbers], heat: NDArray[np.float64]) -> list[tuple[int, _BlockNumbers]]:
    """Return runs with their new blocks, always next the one whose new blocks are hottest on average.

    Listing a run removes the first blocks of others, which are their hottest: a stored value can only be too high, so
    that only the run on top needs to be evaluated again.
    """
    listed: list[tuple[int, _BlockNumbers]] = []
    is_listed = np.zeros(len(heat), dtype=np.bool_)
    waiting = [(-float(heat[run].mean()), at) for at, run in enumerate(runs) if len(run)]
    heapify(waiting)
    while waiting:
        believed, at = heappop(waiting)
        new = runs[at][~is_listed[runs[at]]]
        if not len(new):
            continue
        value = -float(heat[new].mean())
        if value > believed:
            heappush(waiting, (value, at))
        else:
            listed.append((at, new))
            is_listed[new] = True
    return listed


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

    async def compute(self, recent: RecentPrompt, prompt: EncodedPrompt, verdict: Verdict, within_s: float) -> str:
        """Send `prompt`, the beginning of a recent one, to the winner of `verdict`, and await its answer.

        Return why it was not computed, empty if it was.
        """
        fields = {
            "model": recent.model,
            "prompt": unpack_tokens(prompt.ids),
            "max_tokens": 1 if verdict.request.phase == "whole" else 2,
            **({"cache_salt": recent.salt} if recent.salt else {}),
        }
        client = BufferedResponse(self._upstreams)
        exchange = Exchange(client, "POST", COMPLETIONS, "", {}, msgspec.json.encode(fields), 0.0)
        cache = _Cache(prompt, verdict, self._serving, self.decide)
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
    """Where one prompt goes; `over` is set at its end."""

    def __init__(
        self,
        prompt: EncodedPrompt,
        verdict: Verdict,
        serving: Serving,
        decide: Callable[[RouteRequest], Verdict | None],
    ) -> None:
        """`verdict` is the decision for the first worker; `decide` chooses the one that fetches its KV."""
        self._prompt, self._verdict, self._serving, self._decide = prompt, verdict, serving, decide
        self.over = asyncio.Event()
        self.fault = _GIVEN_UP
        """Why the first worker did not compute the prompt; empty if it did."""

    async def read(self, request: FleetRequest) -> None:
        """Set body, prompt and route, and a plan with one try at each phase."""
        exchange, route = request.exchange, self._verdict.request
        read = await request.later(self._serving.bodies.read(exchange.path, exchange.body))
        request.body, request.inbound = read
        request.prompt, request.route, request.first_route = self._prompt, route, route
        request.plan = first_plan(route.phase, retry_limit=0, falls_back=False)

    def routed(self, request: FleetRequest, pinned: str | None = None) -> None:
        """Set the route to the decode worker."""
        self._serving.routed(request, pinned)

    def choose(self, request: FleetRequest) -> RankAttempt:
        """Book the work at the first worker, or at one that fetches its KV; raise `RequestRejected`."""
        is_first = request.route is self._verdict.request
        verdict = self._verdict if is_first else self._decide(request.route)
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
        self._serving.settle(request, attempt, outcome)
        if attempt.verdict.request.phase != "decode" and outcome != "cancelled":
            self.fault = "" if attempt.is_success else f"status {attempt.status}"
            if attempt.reason:
                self.fault = f"{attempt.stage}: {attempt.reason}"

    def ended(self, request: FleetRequest, outcome: OutcomeName, refusal: Refusal | None) -> None:  # noqa: ARG002
        """The prompt is computed, or will not be."""
        self.over.set()
