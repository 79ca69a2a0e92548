"""The cost of a candidate in blocks, mode kv's if `policy.cost` is blocks; B = block size, N = ceil(ISL / B).

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
on each bit: `_in_lists` for few ranks, `in_arrays` for any number of them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_protocol.decision import CostTerms, CostUnit, TrustState
from router.decision.policy import CostParameters, Policy
from router.decision.view import Floats, Ints, RouteRequest, View

TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""
SPILL_ISL = 4
"""A rank is over its gate with more queued tokens than this many times a request's own."""
_TERMS_IN_BLOCKS = 7
"""The fields of `CostTerms` that a cost in blocks has."""
_TIMED_COST, _TIMED_CREDIT = 6, 7
"""The rows of `time_cost.terms_of`."""
LISTS_MAX = 16
"""For so many ranks at most the terms are computed number by number: a call of numpy costs more than all of them."""


class CostColumns:
    """The terms of every candidate's cost, as in `CostTerms`; None means 0 everywhere, for the multiplier 1.

    Terms are kept as lists or arrays, as they were computed. The properties are arrays, made when they are read.
    """

    __slots__ = ("_spilled", "_stated", "timed")

    def __init__(
        self,
        terms: tuple[Any, ...] = (),
        spilled: Any = None,  # noqa: ANN401 - a list, an array or None
        timed: Floats | None = None,
    ) -> None:
        """Keep the columns, in the order of the fields of `CostTerms`, all or the first; `spilled` as the property.

        `timed`: the columns as `time_cost.terms_of` returned them, in place of `terms`.
        """
        self._stated = terms
        self._spilled = spilled
        self.timed = timed

    @property
    def _terms(self) -> tuple[Any, ...]:
        if self.timed is not None and not self._stated:
            *addends, cost, credit = self.timed
            self._stated = (credit, None, None, None, None, None, cost, *addends)
        return self._stated

    @property
    def overlap_credit_blocks(self) -> Floats:
        """Blocks credited for what the rank holds."""
        return np.asarray(self._terms[0])

    @property
    def prefill_blocks(self) -> Floats | None:
        """Scaled blocks to prefill."""
        return _array(self._terms[1])

    @property
    def decode_blocks(self) -> Ints | Floats | None:
        """Scaled blocks in use with this request."""
        return _array(self._terms[2])

    @property
    def request_blocks(self) -> Floats | None:
        """Weighted active requests."""
        return _array(self._terms[3])

    @property
    def history_blocks(self) -> Floats | None:
        """Weighted decaying sum of former prefills."""
        return _array(self._terms[4])

    @property
    def constraint_multiplier(self) -> Floats | None:
        """What the sum of the other terms is multiplied by."""
        return _array(self._terms[5])

    @property
    def unit(self) -> CostUnit:
        """What the costs are in."""
        return "ms" if self.timed is not None or len(self._terms) > _TERMS_IN_BLOCKS else "blocks"

    @property
    def cost(self) -> Floats:
        """The cost."""
        return np.asarray(self._terms[6])

    @property
    def spilled(self) -> NDArray[np.bool_] | None:
        """Ranks whose credit the spill gate removed; None: no rank."""
        return None if self._spilled is None else np.asarray(self._spilled)

    def picked(self, places: list[int]) -> list[list[float] | None]:
        """Return the terms of these candidates, in the order of the fields of `CostTerms`."""
        found = list[list[float] | None]()
        for term in self._terms:
            if term is None:
                found.append(None)
            elif type(term) is list:
                found.append([term[place] for place in places])
            else:
                found.append(term[places].tolist())
        return found

    def costs(self) -> list[float]:
        """Return the costs as a list, which is not to be changed."""
        cost: Any = self._terms[6] if self.timed is None else self.timed[_TIMED_COST]
        listed: list[float] = cost if type(cost) is list else cost.tolist()
        return listed

    def column(self, name: str) -> Floats | None:
        """Return the term of this name, a field of `CostTerms`; None if the cost has none."""
        place = CostTerms.__struct_fields__.index(name)
        return _array(self._terms[place]) if place < len(self._terms) else None

    def has_more_credit(self, at: int, other: int) -> bool:
        """Return whether a candidate has more overlap credited than another."""
        if self.timed is not None:
            return self.timed.item(_TIMED_CREDIT, at) > self.timed.item(_TIMED_CREDIT, other)
        credit: Any = self._terms[0]
        return bool(credit[at] > credit[other])

    def terms(self, at: int) -> CostTerms:
        """Return the terms of one candidate."""
        stated = zip(CostTerms.__struct_fields__, self._terms, strict=False)
        return CostTerms(**{name: float(column[at]) for name, column in stated if column is not None})


def _array(column: Any) -> Floats | None:  # noqa: ANN401 - a list, an array or None
    return None if column is None else np.asarray(column)


def cost_columns(view: View, request: RouteRequest, policy: Policy, multiplier: Floats | None = None) -> CostColumns:
    """Return the terms of every rank of `view`, in their order; `multiplier` is that of the constraints."""
    if len(view.ranks) <= LISTS_MAX:
        return _in_lists(view, request, policy, multiplier)
    return in_arrays(view, request, policy, multiplier)


def _in_lists(view: View, request: RouteRequest, policy: Policy, multiplier: Floats | None) -> CostColumns:
    """Return what `in_arrays` returns, bit for bit: every number by the same steps in the same order."""
    parameters = policy.parameters
    block_size, tokens = float(request.block_size), request.isl_tokens
    own_blocks = -(-tokens // request.block_size)
    queued: list[int] = view.queued_tokens.tolist()
    credit = listed_credit(view, queued, request, policy.parameters)
    credit, spilled = _listed_spill(credit, queued, request, policy)
    active: list[int] = view.active_blocks.tolist()
    shared: list[int] = view.shared_blocks.tolist()
    prefill_scale, decode_scale = parameters.prefill_scale, parameters.decode_scale
    prefill, used, decode, cost = list[float](), list[int](), list[float](), list[float]()
    for at, waiting in enumerate(queued):
        blocks = float(waiting + tokens) / block_size - credit[at]
        scaled = blocks * prefill_scale if blocks > 0.0 else 0.0
        in_use = active[at] - shared[at] + own_blocks
        scaled_use = float(in_use) * decode_scale
        prefill.append(scaled)
        used.append(in_use)
        decode.append(scaled_use)
        cost.append(scaled + scaled_use)
    request_blocks = _added(cost, view.active_requests, parameters.request_weight)
    history_blocks = _added(cost, view.history_blocks, parameters.history_weight)
    if multiplier is not None:
        factors: list[float] = multiplier.tolist()
        cost = [each * factors[at] for at, each in enumerate(cost)]
    in_use_blocks: list[Any] = used if decode_scale == 1.0 else decode
    return CostColumns((credit, prefill, in_use_blocks, request_blocks, history_blocks, multiplier, cost), spilled)


def _added(cost: list[float], column: Ints | Floats, weight: float) -> list[float] | None:
    """Return the column times its weight, and add it to the costs."""
    if not weight:
        return None
    weighted = list[float]()
    numbers: list[Any] = column.tolist()
    for at, number in enumerate(numbers):
        term = float(number) * weight
        weighted.append(term)
        cost[at] += term
    return weighted


def listed_credit(view: View, queued: list[int], request: RouteRequest, parameters: CostParameters) -> list[float]:
    """Return what `credit_column` returns, number by number."""
    tokens, weight = request.isl_tokens, parameters.overlap_credit
    if not weight:
        return [0.0] * len(queued)
    predicted: list[int] = view.predicted.tolist()
    tiers: list[list[int]] = view.overlap[:3].tolist()
    device = [max(held, predicted[at]) for at, held in enumerate(tiers[0])]
    credit = [float(blocks) * weight for blocks in device]
    if parameters.overlap_credit_decay:
        least, own = min(queued), float(max(1, -(-tokens // request.block_size) * request.block_size))
        for at, waiting in enumerate(queued):
            credit[at] *= 1.0 / (parameters.overlap_credit_decay * (float(waiting - least) / own) + 1.0)
    if tiers[0] != tiers[1] or tiers[1] != tiers[2]:
        for at, gpu in enumerate(device):
            host, disk = max(tiers[1][at], predicted[at]), max(tiers[2][at], predicted[at])
            credit[at] += float(host - gpu) * parameters.host_weight
            credit[at] += float(disk - host) * parameters.disk_weight
    if view.trust_factor is not None:
        factors: list[float] = view.trust_factor.tolist()
        credit = [each * factors[at] for at, each in enumerate(credit)]
    return credit


def _listed_spill(
    credit: list[float], queued: list[int], request: RouteRequest, policy: Policy
) -> tuple[list[float], list[bool] | None]:
    gate_tokens = max(SPILL_ISL * request.isl_tokens, policy.spill_tokens)
    is_off = not policy.spill_tokens or not policy.parameters.overlap_credit
    if is_off or max(queued) <= gate_tokens or 2 * min(queued) >= gate_tokens:
        return credit, None
    spilled = [waiting > gate_tokens for waiting in queued]
    return [0.0 if spilled[at] else each for at, each in enumerate(credit)], spilled


def in_arrays(view: View, request: RouteRequest, policy: Policy, multiplier: Floats | None = None) -> CostColumns:
    """Return the terms as `cost_columns` does, computed column by column for any number of ranks."""
    parameters, tokens, block_size = policy.parameters, request.isl_tokens, request.block_size
    credit = credit_column(view, request, parameters)
    spilled = None
    if policy.spill_tokens and parameters.overlap_credit:
        spilled = _spilled(view.queued_tokens, max(SPILL_ISL * tokens, policy.spill_tokens))
    if spilled is not None:
        credit[spilled] = 0.0
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
    return CostColumns((credit, prefill, decode, request_blocks, history_blocks, multiplier, cost), spilled)


def _weighted(column: Ints | Floats, weight: float) -> Floats | None:
    if not weight:
        return None
    weighted: Floats = column * np.float64(weight)
    return weighted


def credit_column(view: View, request: RouteRequest, parameters: CostParameters) -> Floats:
    """Return the blocks credited to each rank for what it holds, before the spill gate."""
    queued, tokens = view.queued_tokens, request.isl_tokens
    if not parameters.overlap_credit:
        return np.zeros(len(queued))
    device, host, disk = np.maximum(view.overlap[:3], view.predicted)
    credit: Floats = device * parameters.overlap_credit
    if parameters.overlap_credit_decay:
        credit *= _decay(queued, -(-tokens // request.block_size) * request.block_size, parameters)
    if device.tobytes() != disk.tobytes():  # the tiers between them add nothing if these agree
        credit += (host - device) * parameters.host_weight
        credit += (disk - host) * parameters.disk_weight
    if view.trust_factor is not None:
        credit *= view.trust_factor
    return credit


def _decay(queued: Ints, tokens: int, parameters: CostParameters) -> Floats:
    excess = (queued - np.minimum.reduce(queued)) / max(1, tokens)
    decay: Floats = 1.0 / (parameters.overlap_credit_decay * excess + 1.0)
    return decay


def _spilled(queued: Ints, gate_tokens: int) -> NDArray[np.bool_] | None:
    if np.maximum.reduce(queued) <= gate_tokens or 2 * np.minimum.reduce(queued) >= gate_tokens:
        return None
    over: NDArray[np.bool_] = queued > gate_tokens
    return over
