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

Each term is a column over the candidates. It is computed in C++ (`router/native/time_terms.cpp`) where that was built,
and with numpy otherwise: by the same steps in the same order, so that all machines agree on each bit.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from router import native
from router.decision.cost import CostColumns, credit_column
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


class Sizes(NamedTuple):
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
    assert view.rates is not None, "the view was made for another mode"
    parameters, rates = policy.parameters, view.rates
    terms = terms_of(view, request, parameters, sizes_of(request, parameters, rates))
    if multiplier is not None:
        *addends, cost, credit = terms
        return CostColumns((credit, None, None, None, None, multiplier, cost * multiplier, *addends))
    return CostColumns(timed=terms)


def sizes_of(request: RouteRequest, parameters: CostParameters, rates: RateColumns) -> Sizes:
    """Return what the formula reads of the request and of the policy."""
    output_tokens = float(request.expected_osl) if request.expected_osl else rates.output_tokens
    if request.max_tokens:
        output_tokens = min(output_tokens, float(request.max_tokens))
    return Sizes(
        float(request.isl_tokens),
        float(request.block_size),
        float(-(-request.isl_tokens // request.block_size)),
        output_tokens,
        1e3 * parameters.lateness_s,
        parameters.ttft_weight,
        request.phase != "decode",
        request.phase != "prefill",
    )


_built: Any = native.load()
_engine: Any = _built and _built.ReferenceEngine(_TOKEN_MS, _PAIR_MS, _STEP_MS, _SEQUENCE_MS, _KV_TOKEN_MS)


@lru_cache(maxsize=16)
def _credit_rules(parameters: CostParameters) -> Any:  # noqa: ANN401 - of the extension
    return _built.CreditRules(
        parameters.overlap_credit, parameters.overlap_credit_decay, parameters.host_weight, parameters.disk_weight
    )


def terms_of(view: View, request: RouteRequest, parameters: CostParameters, sizes: Sizes) -> Floats:
    """Return the terms from wait to slowdown, the cost without the constraints' multiplier, and the credit: (8, n)."""
    rates = view.rates
    if _engine is None or rates is None:
        return terms_in_numpy(view, request, parameters, sizes)
    packed = _engine.terms(
        view.overlap,
        view.predicted,
        view.queued_tokens,
        view.active_requests,
        view.active_blocks,
        view.shared_blocks,
        view.trust_factor,
        rates.prefill,
        rates.decode,
        _credit_rules(parameters),
        *sizes,
    )
    return np.ndarray((8, len(view.ranks)), np.float64, packed)


def terms_in_numpy(view: View, request: RouteRequest, parameters: CostParameters, sizes: Sizes) -> Floats:
    """Return what `terms_of` returns, bit for bit."""
    rates, credit = view.rates, credit_column(view, request, parameters)
    assert rates is not None, "the view was made for another mode"
    wait = prefill = lateness = stall = decode = slowdown = np.zeros(len(view.ranks))
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
    return np.array([wait, prefill, lateness, stall, decode, slowdown, cost, credit])


def expected_of(view: View, request: RouteRequest, place: int) -> ExpectedRow:
    """Return the latencies that the reference engine would have at the rank, to be compared with the measured ones.

    The TTFT is 0, and nothing is learnt from it, for a decode worker: its prompts are computed elsewhere.
    """
    expected = max(view.overlap.item(0, place), view.predicted.item(place))
    uncached = float(max(0, request.isl_tokens - expected * request.block_size))
    pairs = uncached * (float(request.isl_tokens) - uncached * 0.5)
    queued = float(view.queued_tokens.item(place))
    ttft_s = FIRST_S + (queued + uncached) * PREFILL_TOKEN_S + pairs * PREFILL_PAIR_S
    own_blocks = -(-request.isl_tokens // request.block_size)
    blocks = view.active_blocks.item(place) - view.shared_blocks.item(place) + own_blocks
    step_s = STEP_S + (float(view.active_requests.item(place)) + 1.0) * STEP_SEQUENCE_S
    return ExpectedRow(
        request.decision_id,
        request.model,
        view.ranks[place],
        0.0 if request.phase == "decode" else ttft_s,
        step_s + float(blocks * request.block_size) * STEP_KV_TOKEN_S,
    )
