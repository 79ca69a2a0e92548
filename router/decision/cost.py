"""The cost of a candidate, in blocks; B = block size, N = ceil(ISL / B).

    credit  = trust * (overlap_credit * decay * device + host_weight * host + disk_weight * disk)
    decay   = 1 / (1 + overlap_credit_decay * excess),  excess = ((queued - least queued) / B) / N
    prefill = max(0, (queued + ISL) / B - credit)
    decode  = |active blocks of the rank UNION blocks of this request|
    cost    = (prefill_scale * prefill + decode_scale * decode + request_weight * active requests
               + history_weight * history) * constraint_multiplier

`queued`: uncached tokens promised to the rank, of requests before their first token. `device`, `host`,
`disk`: blocks that each tier adds to the prefix; expected blocks count as on the device. trust: EXACT 1, DEGRADED 0.5
of what was last known, FALLBACK 1 of what was routed there. A request promises N blocks; prefill is not rounded. With
overlap_credit 0 no tier is credited: the policy then uses load only.

`constraint_multiplier` comes from preferred taints and from session affinity. The columns of prefill and decode are
scaled already.

Spill gate (off when spill_tokens is 0): a rank with queued > max(4 * ISL, spill_tokens) has no credit while another has
less than half of that.

N and overlap_credit 0 are as in NVIDIA Dynamo (`router bench oracle`). Each term is a column over the candidates. Every
number results from additions, products and comparisons of its own column, in a fixed order, so that all machines agree
on each bit.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.decision import CostTerms, TrustState
from router.decision.policy import CostParameters, Policy
from router.decision.view import Floats, Ints, RouteRequest, View

TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""
SPILL_ISL = 4
"""A rank is over its gate with more queued tokens than this many times a request's own."""


class CostColumns(NamedTuple):
    """The terms of every candidate's cost, as in `CostTerms`; None means 0 everywhere, for the multiplier 1."""

    overlap_credit_blocks: Floats
    prefill_blocks: Floats
    decode_blocks: Ints | Floats
    request_blocks: Floats | None
    history_blocks: Floats | None
    constraint_multiplier: Floats | None
    cost: Floats
    spilled: NDArray[np.bool_] | None
    """Ranks whose credit the spill gate removed; None: no rank."""

    def terms(self, at: int) -> CostTerms:
        """Return the terms of one candidate."""
        return CostTerms(
            overlap_credit_blocks=float(self.overlap_credit_blocks[at]),
            prefill_blocks=float(self.prefill_blocks[at]),
            decode_blocks=float(self.decode_blocks[at]),
            request_blocks=_at(self.request_blocks, at, 0.0),
            history_blocks=_at(self.history_blocks, at, 0.0),
            constraint_multiplier=_at(self.constraint_multiplier, at, 1.0),
            cost=float(self.cost[at]),
        )


def _at(column: Floats | None, at: int, default: float) -> float:
    return default if column is None else float(column[at])


def cost_columns(view: View, request: RouteRequest, policy: Policy, multiplier: Floats | None = None) -> CostColumns:
    """Return the terms of every rank of `view`, in their order; `multiplier` is that of the constraints."""
    parameters, tokens, block_size = policy.parameters, request.isl_tokens, request.block_size
    credit, spilled = _credit(view, request, policy)
    prefill = np.maximum((view.queued_tokens + tokens) / block_size - credit, 0.0)
    if parameters.prefill_scale != 1.0:
        prefill *= parameters.prefill_scale
    decode: Ints | Floats = view.active_blocks - view.shared_blocks + -(-tokens // block_size)
    if parameters.decode_scale != 1.0:
        scaled: Floats = decode * np.float64(parameters.decode_scale)
        decode = scaled
    cost: Floats = np.add(prefill, decode)
    request_blocks = _weighted(view.active_requests, parameters.request_weight)
    if request_blocks is not None:
        cost += request_blocks
    history_blocks = _weighted(view.history_blocks, parameters.history_weight)
    if history_blocks is not None:
        cost += history_blocks
    if multiplier is not None:
        cost *= multiplier
    return CostColumns(credit, prefill, decode, request_blocks, history_blocks, multiplier, cost, spilled)


def _weighted(column: Ints | Floats, weight: float) -> Floats | None:
    if not weight:
        return None
    weighted: Floats = column * np.float64(weight)
    return weighted


def _credit(view: View, request: RouteRequest, policy: Policy) -> tuple[Floats, NDArray[np.bool_] | None]:
    parameters, queued, tokens = policy.parameters, view.queued_tokens, request.isl_tokens
    if not parameters.overlap_credit:
        return np.zeros(len(queued)), None
    device, host, disk = np.maximum(view.overlap[:3], view.predicted)
    credit: Floats = device * parameters.overlap_credit
    if parameters.overlap_credit_decay:
        credit *= _decay(queued, -(-tokens // request.block_size) * request.block_size, parameters)
    if device.tobytes() != disk.tobytes():  # the tiers between them add nothing if these agree
        credit += (host - device) * parameters.host_weight
        credit += (disk - host) * parameters.disk_weight
    if view.trust_factor is not None:
        credit *= view.trust_factor
    spilled = _spilled(queued, max(SPILL_ISL * tokens, policy.spill_tokens)) if policy.spill_tokens else None
    if spilled is not None:
        credit[spilled] = 0.0
    return credit, spilled


def _decay(queued: Ints, tokens: int, parameters: CostParameters) -> Floats:
    excess = (queued - np.minimum.reduce(queued)) / max(1, tokens)
    decay: Floats = 1.0 / (parameters.overlap_credit_decay * excess + 1.0)
    return decay


def _spilled(queued: Ints, gate_tokens: int) -> NDArray[np.bool_] | None:
    if np.maximum.reduce(queued) <= gate_tokens or 2 * np.minimum.reduce(queued) >= gate_tokens:
        return None
    over: NDArray[np.bool_] = queued > gate_tokens
    return over
