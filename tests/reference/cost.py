"""The cost of a candidate in blocks, mode kv-blocks; B = block size, N = ceil(ISL / B).

    credit  = trust * (overlap_credit * decay * device + host_weight * host + disk_weight * disk)
    decay   = 1 / (1 + overlap_credit_decay * excess),  excess = ((queued - least queued) / B) / N
    prefill = max(0, (queued + ISL) / B - credit)
    decode  = |active blocks of the rank UNION blocks of this request|
    cost    = (prefill_scale * prefill + decode_scale * decode + request_weight * active requests
               + history_weight * history) * constraint_multiplier

`queued`: uncached tokens promised to the rank, of requests before their first token. `device`, `host`,
`disk`: blocks that each tier adds to the prefix; expected blocks count as on the device. trust: 1 for an EXACT
rank; 0.5 for a DEGRADED one, of its last known blocks; 1 for a FALLBACK one, of the blocks of requests that were routed
to it. A request promises N blocks; prefill is not rounded. With overlap_credit 0 no tier is credited: the policy then
uses load only.

`constraint_multiplier` comes from preferred taints and from session affinity. The terms of prefill and decode are
scaled already.

Spill gate (off when spill_tokens is 0): a rank with queued > max(4 * ISL, spill_tokens) has no credit while another has
less than half of that.

N and overlap_credit 0 are as in NVIDIA Dynamo. Every number results from additions, products
and comparisons in a fixed order, so that all machines agree on each bit.
"""

from collections.abc import Sequence

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import CostTerms, TrustState
from router.decision.policy import CostParameters, Policy
from tests.reference.view import Row

TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""
SPILL_ISL = 4
"""A rank is over its gate with more queued tokens than this many times a request's own."""


def terms_in_blocks(
    rows: Sequence[Row], request: RouteRequest, policy: Policy, multipliers: Sequence[float]
) -> list[CostTerms]:
    """Return the terms of every candidate; `multipliers` are those of the constraints."""
    parameters, credits_ = policy.parameters, credited_blocks(rows, request, policy.parameters)
    gate_tokens = max(SPILL_ISL * request.isl_tokens, policy.spill_tokens)
    if policy.spill_tokens and 2 * min(row.queued_tokens for row in rows) < gate_tokens:
        credits_ = [
            0.0 if row.queued_tokens > gate_tokens else credit for row, credit in zip(rows, credits_, strict=True)
        ]
    own_blocks, found = -(-request.isl_tokens // request.block_size), list[CostTerms]()
    for row, credit, multiplier in zip(rows, credits_, multipliers, strict=True):
        blocks = float(row.queued_tokens + request.isl_tokens) / float(request.block_size) - credit
        prefill = max(0.0, blocks) * parameters.prefill_scale
        decode = float(row.active_blocks - row.shared_blocks + own_blocks) * parameters.decode_scale
        requests = float(row.active_requests) * parameters.request_weight
        history = row.history_blocks * parameters.history_weight
        found.append(
            CostTerms(
                overlap_credit_blocks=credit,
                prefill_blocks=prefill,
                decode_blocks=decode,
                request_blocks=requests,
                history_blocks=history,
                constraint_multiplier=multiplier,
                cost=(prefill + decode + requests + history) * multiplier,
            )
        )
    return found


def credited_blocks(
    rows: Sequence[Row], request: RouteRequest, parameters: CostParameters, lost: Sequence[int] | None = None
) -> list[float]:
    """Return the blocks credited to each candidate for what it holds, before the spill gate.

    What is `lost` falls to the host where the rank has more of the prefix there.
    """
    if not parameters.overlap_credit:
        return [0.0] * len(rows)
    least = min(row.queued_tokens for row in rows)
    own_tokens = max(1, -(-request.isl_tokens // request.block_size) * request.block_size)
    found = list[float]()
    for row, lost_blocks in zip(rows, lost or [0] * len(rows), strict=True):
        device, host, disk = (max(held, row.predicted) for held in row.depths[:3])
        credit = float(device) * parameters.overlap_credit
        excess = float(row.queued_tokens - least) / float(own_tokens)
        credit *= 1.0 / (parameters.overlap_credit_decay * excess + 1.0)
        credit += float(host - device) * parameters.host_weight
        credit += float(disk - host) * parameters.disk_weight
        worth = parameters.overlap_credit - (parameters.host_weight if row.depths[1] > row.depths[0] else 0.0)
        found.append(max(0.0, credit - float(lost_blocks) * worth) * row.trust_factor)
    return found
