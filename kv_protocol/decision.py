"""A routing decision as data: every candidate with every cost term, so that it can be explained and taken again.

Costs are in blocks. Formulas: `router/decision/cost.py`.
"""

from typing import Literal

import msgspec

from kv_protocol.errors import LimitExceeded

TrustState = Literal["EXACT", "DEGRADED", "FALLBACK"]
OverlapSource = Literal["index", "approximate"]
"""Who says what a rank holds: the index, which follows its events, or what was routed to it, where there are none."""


class CostTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The addends of one candidate's cost, in blocks; `cost` is their sum, times the constraint multiplier."""

    overlap_credit_blocks: float = 0.0
    prefill_blocks: float = 0.0
    decode_blocks: float = 0.0
    request_blocks: float = 0.0
    history_blocks: float = 0.0
    constraint_multiplier: float = 1.0
    cost: float = 0.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One eligible rank as it stood: what it held of the request, how far its stream was read, and its cost.

    `overlap_blocks[t]` is the longest prefix held on tiers 0..t, as `overlap_source` has it, `predicted_blocks` the
    longest that is on its way there with requests routed before. `seq` is the last applied number of `epoch`.
    """

    worker_id: str
    dp_rank: int
    overlap_blocks: tuple[int, int, int, int]
    overlap_source: OverlapSource = "index"
    predicted_blocks: int = 0
    trust: TrustState
    trust_reason: str
    epoch: int
    seq: int
    terms: CostTerms
    is_weighed: bool = True
    """Whether the policy looked at costs; where it did not, `terms` say nothing."""
    is_spilled: bool = False
    """Whether the spill gate took its credit: too much is queued there, and little elsewhere."""
    predicted_ttft_s: float | None = None
    predicted_itl_s: float | None = None

    @property
    def expected_blocks(self) -> int:
        """How many leading blocks the rank is counted on to have on its GPU."""
        return max(self.overlap_blocks[0], self.predicted_blocks)


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that could not take the request, and why."""

    worker_id: str
    dp_rank: int
    reason: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes a request, and all that was weighed.

    `winner` and `runner_up` index `candidates`; `margin_blocks` is the runner-up's cost minus the winner's, and there
    is neither for a single candidate. `isl_tokens` is the whole prompt, `reusable_blocks` what a cache could give of it
    (the full blocks of all tokens but the last, which is always computed).
    """

    decision_id: str
    request_id: str
    model: str
    policy: str
    seed: int
    now_s: float
    block_size: int
    isl_tokens: int
    reusable_blocks: int
    winner: int
    runner_up: int | None
    margin_blocks: float | None
    candidates: tuple[Candidate, ...]
    excluded: tuple[Exclusion, ...] = ()
    phase: str = "whole"
    """What the worker is asked for (`decided.Phase`)."""
    endpoint: str = "chat"
    """The OpenAI endpoint that was called (`api_endpoints.py`)."""
    reason: str = ""
    """In one word of a closed set, why the winner won."""
    action: str = "admit"
    """What the policy has done with the request: admit, queue or reject."""
    regret_blocks: int = 0
    """By how much another candidate's overlap was longer than the winner's."""
    session_rank: str = ""
    """`worker/dp_rank` to which the request's session is bound; empty: to none."""

    def __post_init__(self) -> None:
        for field, index in (("winner", self.winner), ("runner_up", self.runner_up)):
            if index is not None and not 0 <= index < len(self.candidates):
                raise LimitExceeded(field, index, f"the index of one of {len(self.candidates)} candidates")

    @property
    def chosen(self) -> Candidate:
        """The rank that takes the request."""
        return self.candidates[self.winner]
