"""What a request saved, of its decision and of its outcome, and sums of that. Pure.

    predicted(r)   min(blocks that rank r is expected to hold, reusable blocks) * B       B = block size
    reused         cached tokens that the worker reported, at most the prompt; predicted(winner) if it reported none
    baseline       (reused + sum of predicted(r) over the other candidates) / candidates  a candidate drawn evenly
    routing        reused - baseline; may be below 0
    foregone       max(0, largest predicted(r) of the other candidates - predicted(winner))
    seconds(c)     p * (c * PREFILL_TOKEN + c^2 / 2 * PREFILL_PAIR)       to compute the first c tokens of a prompt
    saved          seconds(reused)
    baseline in s  the mean of seconds over the candidates, as for tokens

p is the winner's prefill factor at the decision (`rates.hpp`), 1 where nothing was learnt. A request whose
candidates were not compared (the mode reads no overlap) has its own reuse as baseline: no saving by routing is claimed.
"""

from typing import NamedTuple

from kv_protocol.journal import OutcomeKnown
from router.decision.verdict import Verdict
from router.native.engine import PREFILL_PAIR_S, PREFILL_TOKEN_S
from router.prompt.chains import BLOCK_BYTES, block_count


class Placement(NamedTuple):
    """A decision, as far as its saving depends on it. Blocks of the other candidates are summed, and their squares."""

    model: str
    tenant: str
    lora: str
    prefix: str
    isl_tokens: int
    """Of the prompt; 0: it was not encoded."""
    block_size: int
    predicted_tokens: int
    candidates: int
    """0: they were not compared."""
    others_blocks: int
    others_blocks_squared: int
    best_blocks: int
    """Most blocks that another candidate was expected to have."""
    factor: float
    is_learnt: bool

    def seconds(self, tokens: int) -> float:
        """Return how long the rank would compute the first tokens of a prompt."""
        return self.factor * (tokens * PREFILL_TOKEN_S + tokens * tokens / 2 * PREFILL_PAIR_S)


class Sums:
    """What some requests saved together, in tokens and in seconds of their ranks.

    compared_requests    requests whose candidates were compared
    reported_tokens      the part of `reused_tokens` that workers reported; the rest was predicted
    learnt_s             the part of `saved_s` that is computed with a learnt factor
    """

    __slots__ = (
        "baseline_s", "baseline_tokens", "compared_requests", "evicted_blocks", "foregone_tokens", "learnt_s",
        "prompt_tokens", "reported_tokens", "requests", "reused_tokens", "saved_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.compared_requests = 0
        self.prompt_tokens = self.reused_tokens = self.reported_tokens = self.foregone_tokens = 0
        self.baseline_tokens = self.saved_s = self.learnt_s = self.baseline_s = self.evicted_blocks = 0.0

    def add(self, other: "Sums") -> None:
        """Add all requests of `other`."""
        self.requests += other.requests
        self.compared_requests += other.compared_requests
        self.prompt_tokens += other.prompt_tokens
        self.reused_tokens += other.reused_tokens
        self.reported_tokens += other.reported_tokens
        self.baseline_tokens += other.baseline_tokens
        self.foregone_tokens += other.foregone_tokens
        self.saved_s += other.saved_s
        self.learnt_s += other.learnt_s
        self.baseline_s += other.baseline_s
        self.evicted_blocks += other.evicted_blocks


def family_of(chain: bytes, family_blocks: int) -> str:
    """Return the sequence hash of the prompt's block `family_blocks`, or of its last full one; empty without any."""
    blocks = min(block_count(chain), family_blocks)
    return chain[(blocks - 1) * BLOCK_BYTES : blocks * BLOCK_BYTES][::-1].hex() if blocks else ""


def placement_of(verdict: Verdict, family_blocks: int) -> Placement | None:
    """Return what the request's saving depends on; None for a phase that computes no prompt."""
    request = verdict.request
    if request.phase == "decode":
        return None
    candidates, others, squares, best = 0, 0, 0, 0
    if not verdict.is_blank and request.known_tokens:
        candidates, others, squares, best = verdict.compared_blocks()
    return Placement(
        request.model,
        request.tenant,
        request.lora,
        family_of(request.sequence_hashes, family_blocks),
        request.known_tokens,
        request.block_size,
        min(verdict.expected_blocks, request.reusable_blocks) * request.block_size,
        candidates,
        others,
        squares,
        best,
        verdict.prefill_factor,
        verdict.is_learnt,
    )


def saving_of(placement: Placement, outcome: OutcomeKnown) -> Sums:
    """Return the sums of one answered request."""
    reported, candidates = outcome.cached_tokens, placement.candidates
    reused = placement.predicted_tokens if reported is None else min(reported, placement.isl_tokens)
    saving, saved_s = Sums(), placement.seconds(reused)
    saving.requests = 1
    saving.prompt_tokens, saving.reused_tokens = placement.isl_tokens, reused
    saving.reported_tokens = 0 if reported is None else reused
    saving.foregone_tokens = max(0, placement.best_blocks * placement.block_size - placement.predicted_tokens)
    saving.saved_s = saving.baseline_s = saved_s
    saving.learnt_s = saved_s if placement.is_learnt else 0.0
    saving.baseline_tokens = float(reused)
    if candidates:
        size = placement.block_size
        pairs = placement.others_blocks_squared * size * size / 2
        others_s = placement.factor * (placement.others_blocks * size * PREFILL_TOKEN_S + pairs * PREFILL_PAIR_S)
        saving.compared_requests = 1
        saving.baseline_tokens = (reused + placement.others_blocks * size) / candidates
        saving.baseline_s = (saved_s + others_s) / candidates
    return saving
