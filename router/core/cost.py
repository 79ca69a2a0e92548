"""The cost of a candidate, in blocks; B = block size, N = ISL / B.

    overlap_credit = trust * (overlap_credit * decay * device + host_weight * host + disk_weight * disk)
    decay          = 1 / (1 + overlap_credit_decay * excess),  excess = ((queued - least queued) / B) / N
    prefill        = max(0, (queued + ISL) / B - overlap_credit)
    decode         = |active blocks of the rank UNION blocks of this request|
    cost           = (prefill_scale * prefill + decode + request_weight * active requests + history_weight * history)
                     * constraint_multiplier

`queued`: uncached tokens promised to the rank and not yet past their first token. `device`, `host`, `disk`: blocks that
each tier adds to the prefix; what is on its way to the rank counts as on the device. trust: EXACT 1, DEGRADED 0.5 of
what was last known, FALLBACK 1 of what was routed there. Source: `routing.md`, "Cost of a candidate".
"""

from collections.abc import Sequence

import msgspec

from kv_protocol.decision import CostTerms, TrustState
from router.core.view import RankRow, RouteRequest

TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""What share of a rank's overlap is credited; of a FALLBACK rank the overlap is the approximate index's."""


class CostParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the terms."""

    overlap_credit: float = 1.0
    overlap_credit_decay: float = 0.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    prefill_scale: float = 1.0
    request_weight: float = 0.0
    history_weight: float = 0.5


def cost_terms(request: RouteRequest, rows: Sequence[RankRow], parameters: CostParameters) -> list[CostTerms]:
    """Return the terms of every row, in their order."""
    least = min((row.prefill_tokens_queued for row in rows), default=0)
    return [_terms(request, row, row.prefill_tokens_queued - least, parameters) for row in rows]


def _terms(request: RouteRequest, row: RankRow, excess_tokens: int, parameters: CostParameters) -> CostTerms:
    block_size = request.block_size
    decay = 1.0 / (1.0 + parameters.overlap_credit_decay * excess_tokens / request.isl_tokens)
    gpu, host, disk, _ = (max(depth, row.predicted_blocks) for depth in row.overlap_blocks)
    credit = TRUST_FACTOR[row.trust] * (
        parameters.overlap_credit * decay * gpu
        + parameters.host_weight * (host - gpu)
        + parameters.disk_weight * (disk - host)
    )
    prefill = max(0.0, (row.prefill_tokens_queued + request.isl_tokens) / block_size - credit)
    decode = float(row.active_blocks - row.shared_blocks + -(-request.isl_tokens // block_size))
    request_blocks = parameters.request_weight * row.active_requests
    history = parameters.history_weight * row.history_blocks
    return CostTerms(
        overlap_credit_blocks=credit,
        prefill_blocks=parameters.prefill_scale * prefill,
        decode_blocks=decode,
        request_blocks=request_blocks,
        history_blocks=history,
        cost=parameters.prefill_scale * prefill + decode + request_blocks + history,
    )
