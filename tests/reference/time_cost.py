"""The cost of a candidate in milliseconds: what all requests together wait longer if the request goes there.

    uncached = max(0, ISL - credit * B)
    credit   = trust * max(0, overlap_credit * device + host_weight * host + disk_weight * disk - what is lost)
    lost     = min(over, max(0, expected blocks - those in use)),   over = max(0, blocks in use with it - C)
    wait     = p * queued tokens * PREFILL_TOKEN                    for the prompts queued before
    prefill  = p * (uncached * PREFILL_TOKEN + pairs * PREFILL_PAIR),   pairs = uncached * (ISL - uncached / 2)
    lateness = (wait + prefill)^2 / lateness_s                      a late first token is worse than two early ones
    stall    = prefill * active requests                            they get no token meanwhile
    decode   = d * O * (STEP + (active requests + 1) * STEP_SEQUENCE + (blocks in use with it) * B * STEP_KV_TOKEN)
    slowdown = d * O * active requests * (STEP_SEQUENCE + N * B * STEP_KV_TOKEN)   of their steps, by its decoding
    cost     = (ttft_weight * (wait + prefill + lateness) + stall + decode + slowdown) * constraint_multiplier

B = block size, N = ceil(ISL / B). p and d are the rank's learnt factors, and capitals the reference engine's constants
(`rates.py`). O: expected tokens of the answer, as learnt for the model, at most the request's limit; the client's own
estimate is preferred. A prefill worker decodes nothing: it has neither stall, decode nor slowdown. A decode worker gets
the prompt's KV: it has decode and slowdown alone, and no credit.

`device`, `host`, `disk`: blocks that each tier adds to the prefix; expected blocks count as on the device. trust: 1 for
an EXACT rank; 0.5 for a DEGRADED one, of its last known blocks; 1 for a FALLBACK one, of the blocks of requests that
were routed to it. What is lost falls to the host where the rank has more of the prefix there. With overlap_credit 0 no
tier is credited: the policy then uses load only.

Lost: a rank whose C KV blocks do not suffice for its promised requests and this one admits those before first. They
take what nothing uses, so by the time that the request is computed, as many of its blocks are gone as were missing.
Where C is not known, over = 0.

Every number results from the same steps in the same order as in C++, so that all machines agree on each bit.
"""

from collections.abc import Sequence

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import CostTerms, TrustState
from router.decision.policy import CostParameters, Policy
from tests.reference.rates import (
    FIRST_S,
    PREFILL_PAIR_S,
    PREFILL_TOKEN_S,
    STEP_KV_TOKEN_S,
    STEP_S,
    STEP_SEQUENCE_S,
    Expected,
)
from tests.reference.view import Row

TOKEN_MS, PAIR_MS = 1e3 * PREFILL_TOKEN_S, 1e3 * PREFILL_PAIR_S
STEP_MS, SEQUENCE_MS, KV_TOKEN_MS = 1e3 * STEP_S, 1e3 * STEP_SEQUENCE_S, 1e3 * STEP_KV_TOKEN_S
TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""


def terms_in_ms(
    rows: Sequence[Row],
    request: RouteRequest,
    policy: Policy,
    multipliers: Sequence[float],
    output_tokens: float,
) -> list[CostTerms]:
    """Return the terms of every candidate; `output_tokens` of an answer are expected of the model."""
    tokens, parameters = answer_tokens(request, output_tokens), policy.parameters
    return [
        _terms(row, request, parameters, multiplier, tokens) for row, multiplier in zip(rows, multipliers, strict=True)
    ]


def answer_tokens(request: RouteRequest, output_tokens: float) -> float:
    """Return how many tokens the answer is expected to have; `output_tokens` are usual for the model."""
    tokens = float(request.expected_osl) if request.expected_osl else output_tokens
    return min(tokens, float(request.max_tokens)) if request.max_tokens else tokens


def predicted_s(
    row: Row, terms: CostTerms, request: RouteRequest, output_tokens: float
) -> tuple[float | None, float | None]:
    """Return the predicted seconds to the first token and between tokens; None where the phase has no such tokens."""
    ttft_s = FIRST_S * row.factors[0] + (terms.wait_ms + terms.prefill_ms) * 1e-3
    itl_s = terms.decode_ms / answer_tokens(request, output_tokens) * 1e-3
    return None if request.phase == "decode" else ttft_s, None if request.phase == "prefill" else itl_s


def credited_blocks(row: Row, parameters: CostParameters, lost: int) -> float:
    """Return the blocks credited to a candidate for what it holds; `lost` of them are evicted before."""
    if not parameters.overlap_credit:
        return 0.0
    device, host, disk = (max(held, row.predicted) for held in row.depths[:3])
    credit = float(device) * parameters.overlap_credit
    credit += float(host - device) * parameters.host_weight
    credit += float(disk - host) * parameters.disk_weight
    worth = parameters.overlap_credit - (parameters.host_weight if row.depths[1] > row.depths[0] else 0.0)
    return max(0.0, credit - float(lost) * worth) * row.trust_factor


def lost_blocks(row: Row, request: RouteRequest) -> int:
    """Return how many of the expected blocks will be evicted before the request is computed."""
    capacity, own_blocks = row.registration.total_kv_blocks, -(-request.isl_tokens // request.block_size)
    if not capacity:
        return 0
    over = max(0, row.active_blocks - row.shared_blocks + own_blocks - capacity)
    return min(over, max(0, row.expected - row.shared_blocks))


def _terms(
    row: Row, request: RouteRequest, parameters: CostParameters, multiplier: float, output_tokens: float
) -> CostTerms:
    lost = lost_blocks(row, request)
    credit = 0.0 if request.phase == "decode" else credited_blocks(row, parameters, lost)
    (p, d), tokens, block_size = row.factors, float(request.isl_tokens), float(request.block_size)
    own_blocks, active = float(-(-request.isl_tokens // request.block_size)), float(row.active_requests)
    wait = prefill = lateness = stall = decode = slowdown = 0.0
    if request.phase != "decode":
        uncached = max(0.0, tokens - credit * block_size)
        pairs = uncached * (tokens - uncached * 0.5)
        wait = float(row.queued_tokens) * TOKEN_MS * p
        prefill = (uncached * TOKEN_MS + pairs * PAIR_MS) * p
        until_first = wait + prefill
        lateness = until_first * until_first / (1e3 * parameters.lateness_s)
    if request.phase != "prefill":
        kv_tokens = (float(row.active_blocks - row.shared_blocks) + own_blocks) * block_size
        step = STEP_MS + (active + 1.0) * SEQUENCE_MS + kv_tokens * KV_TOKEN_MS
        own_ms = SEQUENCE_MS + own_blocks * block_size * KV_TOKEN_MS
        stall = prefill * active
        decode = step * output_tokens * d
        slowdown = active * own_ms * output_tokens * d
    cost = (wait + prefill + lateness) * parameters.ttft_weight + stall + decode + slowdown
    return CostTerms(
        overlap_credit_blocks=credit,
        constraint_multiplier=multiplier,
        cost=cost * multiplier,
        wait_ms=wait,
        prefill_ms=prefill,
        lateness_ms=lateness,
        stall_ms=stall,
        decode_ms=decode,
        slowdown_ms=slowdown,
        overlap_lost_blocks=float(lost),
    )


def expected_latency(row: Row, request: RouteRequest) -> Expected:
    """Return the latencies that the reference engine would have at the rank, to be compared with the measured ones.

    The TTFT is 0, and nothing is learnt from it, for a decode worker: its prompts are computed elsewhere.
    """
    expected = row.expected - lost_blocks(row, request)
    uncached = float(max(0, request.isl_tokens - expected * request.block_size))
    pairs = uncached * (float(request.isl_tokens) - uncached * 0.5)
    ttft_s = FIRST_S + (float(row.queued_tokens) + uncached) * PREFILL_TOKEN_S + pairs * PREFILL_PAIR_S
    blocks = row.active_blocks - row.shared_blocks + -(-request.isl_tokens // request.block_size)
    step_s = STEP_S + (float(row.active_requests) + 1.0) * STEP_SEQUENCE_S
    return Expected(
        request.decision_id,
        request.model,
        row.rank,
        0.0 if request.phase == "decode" else ttft_s,
        step_s + float(blocks * request.block_size) * STEP_KV_TOKEN_S,
    )
