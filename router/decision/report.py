"""A decision beside its outcome, and by how much its predictions missed.

The control plane answers `/v1/decisions/{id}` in this shape; `router/cli/reports.py` makes it from a journal.
"""

from typing import Literal

import msgspec

from kv_protocol.decision import Decision
from kv_protocol.journal import OutcomeKnown

MissKind = Literal["cached", "ttft"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a decision, as `OutcomeKnown` of the journal; `error` is the attempt's failure, if known."""

    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    output_tokens: int | None = None
    error: str = ""


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, and its outcome once that is known. `note` is what the reader has to know of its source."""

    decision: Decision
    outcome: Outcome | None = None
    note: str = ""


class RequestReport(DecisionReport, frozen=True, kw_only=True):
    """The requested decision, and all of its request, oldest first: phases, retries, migrations."""

    decisions: tuple[DecisionReport, ...] = ()


class Misses(msgspec.Struct, frozen=True):
    """By how much a decision's predictions were too optimistic; below 0: pessimistic; None: not comparable."""

    cached_tokens: int | None = None
    """Predicted minus actual cached tokens."""
    ttft_s: float | None = None
    """Seconds that the first token came after the request's target, or, without one, after the prediction."""

    def of(self, kind: MissKind) -> float | None:
        """Return the miss of this kind."""
        return self.cached_tokens if kind == "cached" else self.ttft_s


def predicted_cached_tokens(decision: Decision) -> int:
    """Return the prompt tokens that the winner's GPU held, as `kvrouter_predicted_cached_tokens` counts them."""
    return decision.chosen.overlap_blocks[0] * decision.block_size


def misses(decision: Decision, outcome: Outcome | OutcomeKnown | None, begun_s: float | None = None) -> Misses:
    """Return the decision's misses. A decode phase has no prediction of cached tokens: its KV comes from elsewhere.

    `begun_s`: when the request's first decision was taken, from which its target counts; None: this is the first.
    """
    if outcome is None:
        return Misses()
    cached, expected_s = None, decision.ttft_target_s
    if expected_s is not None and begun_s is not None:
        expected_s -= decision.now_s - begun_s
    if outcome.cached_tokens is not None and decision.isl_tokens and decision.phase != "decode":
        cached = predicted_cached_tokens(decision) - outcome.cached_tokens
    if expected_s is None:
        expected_s = decision.chosen.predicted_ttft_s
    late_s = None if outcome.ttft_s is None or expected_s is None else outcome.ttft_s - expected_s
    return Misses(cached, late_s)
