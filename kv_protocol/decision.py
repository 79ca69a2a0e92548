"""A routing decision as data: every candidate with every cost term, to explain and to repeat it.

Costs are in milliseconds; a user's mode has a unit of its own. Formulas: `tests/reference/time_cost.py`.
"""

from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from kv_protocol.errors import LimitExceeded

TrustState = Literal["EXACT", "DEGRADED", "FALLBACK"]
CostUnit = Literal["ms", "own"]
"""The unit of costs: milliseconds, added up over all requests concerned, or the own unit of a user's mode."""
OverlapSource = Literal["index", "approximate"]
"""The source of a rank's overlap: the index, or, for ranks without events, the approximate index of routed requests."""


class Addend(NamedTuple):
    """A part of a cost: `hint` says what its ms are, `until_first` whether they pass before the first token."""

    hint: str
    until_first: bool = False


class CostTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of one candidate's cost; `cost` is the weighted sum of the addends, times the constraint multiplier.

    The terms in ms are the addends. `overlap_credit_blocks` are the blocks that the overlap spares the rank;
    `overlap_lost_blocks` are held too, but not credited, as they will be evicted before the request is computed.
    """

    overlap_credit_blocks: float = 0.0
    constraint_multiplier: float = 1.0
    cost: float = 0.0
    wait_ms: Annotated[float, Addend("until the rank begins with the prompt", until_first=True)] = 0.0
    prefill_ms: Annotated[float, Addend("to compute what is not cached", until_first=True)] = 0.0
    lateness_ms: Annotated[float, Addend("that grow with the square of wait and prefill", until_first=True)] = 0.0
    stall_ms: Annotated[float, Addend("that running requests wait for this prefill")] = 0.0
    decode_ms: Annotated[float, Addend("to compute the answer")] = 0.0
    slowdown_ms: Annotated[float, Addend("that running requests lose to this answer")] = 0.0
    overlap_lost_blocks: float = 0.0


ADDENDS: dict[str, Addend] = {
    name.removesuffix("_ms"): get_args(kind)[1]
    for name, kind in get_type_hints(CostTerms, include_extras=True).items()
    if name.endswith("_ms")
}
"""The addends of a cost in ms, by the names of their fields in `CostTerms` without the unit."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One eligible rank at the decision: its overlap with the request, its stream's place, and its cost.

    `overlap_blocks[t]` is the longest prefix held on tiers 0..t, as `overlap_source` has it, `predicted_blocks` the
    longest that requests routed before will bring to the rank. `seq` is the last applied batch of `epoch`.
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
    """Whether the policy weighed costs; if not, `terms` are meaningless."""
    predicted_ttft_s: float | None = None
    """Seconds to the first token. Like `predicted_itl_s`, None if not predicted, or the phase makes no such tokens."""
    predicted_itl_s: float | None = None
    """Seconds between tokens."""

    @property
    def expected_blocks(self) -> int:
        """The leading blocks that the rank is expected to have on its GPU."""
        return max(self.overlap_blocks[0], self.predicted_blocks)


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that could not take the request, and why."""

    worker_id: str
    dp_rank: int
    reason: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that takes a request, and all that was weighed.

    `winner` and `runner_up` index `candidates`; `margin` is the runner-up's cost minus the winner's. A single candidate
    has neither runner-up nor margin. `isl_tokens` is the whole prompt, `reusable_blocks` the part that a cache could
    provide (the full blocks of all tokens but the last, which is always computed).
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
    margin: float | None
    candidates: tuple[Candidate, ...]
    excluded: tuple[Exclusion, ...] = ()
    phase: str = "whole"
    """The work for the worker (`decided.RequestPhase`)."""
    endpoint: str = "chat"
    """The OpenAI endpoint that was called (`openai/endpoints.py`)."""
    reason: str = ""
    """Why the winner won: one word of a closed set."""
    action: str = "admit"
    """The policy's action: admit, queue or reject."""
    regret_blocks: int = 0
    """By how many blocks the longest overlap of a candidate exceeds the winner's."""
    cost_unit: CostUnit = "ms"
    """The unit of the costs and of the margin."""
    session_rank: str = ""
    """`worker/dp_rank` to which the request's session is bound; empty: to none."""
    ttft_target_s: float | None = None
    """The request's own target for its first token; None: it has none."""

    def __post_init__(self) -> None:
        for field, index in (("winner", self.winner), ("runner_up", self.runner_up)):
            if index is not None and not 0 <= index < len(self.candidates):
                raise LimitExceeded(field, index, f"the index of one of {len(self.candidates)} candidates")

    @property
    def chosen(self) -> Candidate:
        """The rank that takes the request."""
        return self.candidates[self.winner]
