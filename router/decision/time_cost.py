"""The cost of a candidate in milliseconds: what all requests together wait longer if the request goes there.

    uncached = max(0, ISL - credited blocks * B)                    credited blocks: as in `cost.py`
    wait     = p * queued tokens * PREFILL_TOKEN                    for the prompts queued before
    prefill  = p * (uncached * PREFILL_TOKEN + pairs * PREFILL_PAIR),   pairs = uncached * (ISL - uncached / 2)
    lateness = (wait + prefill)^2 / lateness_s                      a late first token is worse than two early ones
    stall    = prefill * active requests                            they get no token meanwhile
    decode   = d * O * (STEP + (active requests + 1) * STEP_SEQUENCE + (blocks in use with it) * B * STEP_KV_TOKEN)
    slowdown = d * O * active requests * (STEP_SEQUENCE + N * B * STEP_KV_TOKEN)   of their steps, by its decoding
    cost     = (ttft_weight * (wait + prefill + lateness) + stall + decode + slowdown) * constraint_multiplier

B = block size, N = ceil(ISL / B). p and d are the rank's learnt factors, and capitals the reference engine's constants
(`router/fleet/rates.py`). O: expected tokens of the answer, as learnt for the model, at most the request's limit; the
client's own estimate is preferred. A prefill worker decodes nothing: it has neither stall, decode nor slowdown. A
decode worker gets the prompt's KV: it has decode and slowdown alone. There is no spill gate: a queue has its price.

Each term is a column over the candidates, computed as in `cost.py`: number by number for few ranks, column by column
for any number, in the same order, so that all machines agree on each bit.
"""

from typing import NamedTuple

import numpy as np

from router.decision.cost import LISTS_MAX, CostColumns, credit_column, listed_credit
from router.decision.policy import CostParameters, Policy
from router.decision.view import Floats, RouteRequest, View
from router.fleet.rates import (
    FIRST_S,
    PREFILL_PAIR_S,
    PREFILL_TOKEN_S,
    STEP_KV_TOKEN_S,
    STEP_S,
    STEP_SEQUENCE_S,
    RateColumns,
)
from router.journal.checkpoint_rows import ExpectedRow

_TOKEN_MS, _PAIR_MS = 1e3 * PREFILL_TOKEN_S, 1e3 * PREFILL_PAIR_S
_STEP_MS, _SEQUENCE_MS, _KV_TOKEN_MS = 1e3 * STEP_S, 1e3 * STEP_SEQUENCE_S, 1e3 * STEP_KV_TOKEN_S


class _Sizes(NamedTuple):
    """What the formula reads of the request and of the policy. Blocks and tokens are floats here."""

    tokens: float
    block_size: float
    own_blocks: float
    output_tokens: float
    lateness_ms: float
    ttft_weight: float
    is_prefilled: bool
    is_decoded: bool


def time_columns(view: View, request: RouteRequest, policy: Policy, multiplier: Floats | None = None) -> CostColumns:
    """Return the terms of every rank of `view`, in their order; `multiplier` is that of the constraints."""
    columns = _in_lists if len(view.ranks) <= LISTS_MAX else in_arrays
    return columns(view, request, policy.parameters, multiplier)


def _rates(view: View) -> RateColumns:
    assert view.rates is not None, "the view was made for another mode"
    return view.rates


def _sizes(request: RouteRequest, parameters: CostParameters, rates: RateColumns) -> _Sizes:
    output_tokens = float(request.expected_osl) if request.expected_osl else rates.output_tokens
    if request.max_tokens:
        output_tokens = min(output_tokens, float(request.max_tokens))
    return _Sizes(
        float(request.isl_tokens),
        float(request.block_size),
        float(-(-request.isl_tokens // request.block_size)),
        output_tokens,
        1e3 * parameters.lateness_s,
        parameters.ttft_weight,
        request.phase != "decode",
        request.phase != "prefill",
    )


def _in_lists(view: View, request: RouteRequest, parameters: CostParameters, multiplier: Floats | None) -> CostColumns:
    """Return what `in_arrays` returns, bit for bit: every number by the same steps in the same order."""
    rates = _rates(view)
    sizes = _sizes(request, parameters, rates)
    queued: list[int] = view.queued_tokens.tolist()
    credit = listed_credit(view, queued, request, parameters)
    count = len(queued)
    first = _listed_first(queued, credit, rates.prefill.tolist(), sizes) if sizes.is_prefilled else _nothing(count, 3)
    requests: list[int] = view.active_requests.tolist()
    rest = _nothing(count, 3)
    if sizes.is_decoded:
        blocks: list[int] = (view.active_blocks - view.shared_blocks).tolist()
        rest = _listed_rest(first[1], requests, blocks, rates.decode.tolist(), sizes)
    cost = list[float]()
    for wait, prefill, lateness, stall, decode, slowdown in zip(*first, *rest, strict=True):
        cost.append((wait + prefill + lateness) * sizes.ttft_weight + stall + decode + slowdown)
    if multiplier is not None:
        factors: list[float] = multiplier.tolist()
        cost = [each * factors[at] for at, each in enumerate(cost)]
    return CostColumns((credit, None, None, None, None, multiplier, cost, *first, *rest))


def _nothing(count: int, columns: int) -> list[list[float]]:
    return [[0.0] * count for _ in range(columns)]


def _listed_first(queued: list[int], credit: list[float], factors: list[float], sizes: _Sizes) -> list[list[float]]:
    waits, prefills, latenesses = list[float](), list[float](), list[float]()
    for at, factor in enumerate(factors):
        uncached = sizes.tokens - credit[at] * sizes.block_size
        uncached = max(0.0, uncached)
        pairs = uncached * (sizes.tokens - uncached * 0.5)
        wait = float(queued[at]) * _TOKEN_MS * factor
        prefill = (uncached * _TOKEN_MS + pairs * _PAIR_MS) * factor
        until_first = wait + prefill
        waits.append(wait)
        prefills.append(prefill)
        latenesses.append(until_first * until_first / sizes.lateness_ms)
    return [waits, prefills, latenesses]


def _listed_rest(
    prefills: list[float], requests: list[int], blocks: list[int], factors: list[float], sizes: _Sizes
) -> list[list[float]]:
    stalls, decodes, slowdowns = list[float](), list[float](), list[float]()
    own_ms = _SEQUENCE_MS + sizes.own_blocks * sizes.block_size * _KV_TOKEN_MS
    for at, factor in enumerate(factors):
        active = float(requests[at])
        kv_tokens = (float(blocks[at]) + sizes.own_blocks) * sizes.block_size
        step = _STEP_MS + (active + 1.0) * _SEQUENCE_MS + kv_tokens * _KV_TOKEN_MS
        stalls.append(prefills[at] * active)
        decodes.append(step * sizes.output_tokens * factor)
        slowdowns.append(active * own_ms * sizes.output_tokens * factor)
    return [stalls, decodes, slowdowns]


def in_arrays(
    view: View, request: RouteRequest, parameters: CostParameters, multiplier: Floats | None = None
) -> CostColumns:
    """Return the terms as `time_columns` does, computed column by column for any number of ranks."""
    rates = _rates(view)
    sizes = _sizes(request, parameters, rates)
    credit = credit_column(view, request, parameters)
    wait = prefill = lateness = stall = decode = slowdown = credit * 0.0
    active = view.active_requests.astype(np.float64)
    if sizes.is_prefilled:
        uncached: Floats = sizes.tokens - credit * sizes.block_size
        uncached[uncached <= 0.0] = 0.0
        pairs = uncached * (sizes.tokens - uncached * 0.5)
        wait = view.queued_tokens * _TOKEN_MS * rates.prefill
        prefill = (uncached * _TOKEN_MS + pairs * _PAIR_MS) * rates.prefill
        until_first = wait + prefill
        lateness = until_first * until_first / sizes.lateness_ms
    if sizes.is_decoded:
        own_ms = _SEQUENCE_MS + sizes.own_blocks * sizes.block_size * _KV_TOKEN_MS
        blocks = (view.active_blocks - view.shared_blocks).astype(np.float64)
        kv_tokens = (blocks + sizes.own_blocks) * sizes.block_size
        step = _STEP_MS + (active + 1.0) * _SEQUENCE_MS + kv_tokens * _KV_TOKEN_MS
        stall = prefill * active
        decode = step * sizes.output_tokens * rates.decode
        slowdown = active * own_ms * sizes.output_tokens * rates.decode
    cost = (wait + prefill + lateness) * sizes.ttft_weight + stall + decode + slowdown
    if multiplier is not None:
        cost = cost * multiplier
    terms = (wait, prefill, lateness, stall, decode, slowdown)
    return CostColumns((credit, None, None, None, None, multiplier, cost, *terms))


def expected_of(view: View, request: RouteRequest, place: int) -> ExpectedRow:
    """Return the latencies that the reference engine would have at the rank, to be compared with the measured ones.

    The TTFT is 0, and nothing is learnt from it, for a decode worker: its prompts are computed elsewhere.
    """
    uncached = float(max(0, request.isl_tokens - int(view.expected[place]) * request.block_size))
    pairs = uncached * (float(request.isl_tokens) - uncached * 0.5)
    queued = float(view.queued_tokens[place])
    ttft_s = FIRST_S + (queued + uncached) * PREFILL_TOKEN_S + pairs * PREFILL_PAIR_S
    own_blocks = -(-request.isl_tokens // request.block_size)
    blocks = int(view.active_blocks[place]) - int(view.shared_blocks[place]) + own_blocks
    step_s = STEP_S + (float(view.active_requests[place]) + 1.0) * STEP_SEQUENCE_S
    return ExpectedRow(
        request.decision_id,
        request.model,
        view.ranks[place],
        0.0 if request.phase == "decode" else ttft_s,
        step_s + float(blocks * request.block_size) * STEP_KV_TOKEN_S,
    )
