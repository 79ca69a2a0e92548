"""A decision and its outcome: by how much its predictions missed, and both in words.

explanation     returns the words for a decision without its outcome; it was taken, or only asked for
report_lines    returns the words for a decision and its outcome: what `router explain` prints

The control plane answers `/v1/decisions/{id}` in the shape of `RequestReport`; `router/cli/reports.py` makes it from a
journal.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from kv_protocol.decision import ADDENDS, Candidate, Decision
from kv_protocol.journal import OutcomeKnown
from kv_protocol.openai.endpoints import PROMPT_ENDPOINTS

MissKind = Literal["cached", "ttft"]
_CAUSES = {
    "turn": "it was this rank's turn",
    "pinned": "the caller named it",
    "affinity": "the request's session is at home there",
    "newcomer": "no rank had a block of the request and newcomers had their share of such requests",
    "predicted_ttft": "it is predicted to answer first",
    "user": "a mode of the configuration chose it",
}
_BY_LOAD = "An embedding reuses no KV prefix: its worker is chosen without a look at what is cached."


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a decision, as in the journal's `OutcomeKnown`; `error` is the attempt's failure, if known."""

    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    output_tokens: int | None = None
    error: str = ""


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, and its outcome once that is known. `note` says what a reader has to know about its origin."""

    decision: Decision
    outcome: Outcome | None = None
    note: str = ""


class RequestReport(DecisionReport, frozen=True, kw_only=True):
    """The requested decision, and all decisions on its request, oldest first: phases, retries, migrations."""

    decisions: tuple[DecisionReport, ...] = ()


class Misses(msgspec.Struct, frozen=True):
    """By how much a decision's predictions were too optimistic; below 0: too pessimistic; None: not comparable."""

    cached_tokens: int | None = None
    """Predicted minus actual cached tokens."""
    ttft_s: float | None = None
    """Actual time to the first token minus the request's target, or minus the predicted time if it has no target."""

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


# ------------------------------------------------------------------------------------------------------- in words


def explanation(decision: Decision, *, is_hypothetical: bool = False) -> str:
    """Return why that rank was chosen, and a table of the candidates. `is_hypothetical`: no request went there."""
    verb = "would go" if is_hypothetical else "went"
    return "\n".join([_sentence(decision, verb, [_cause(decision), *_alternative(decision)]), *table(decision)])


def report_lines(report: RequestReport) -> list[str]:
    """Return the whole report."""
    lines = [sentence(report), "", *table(report.decision), "", *_outcome_lines(report)]
    if len(report.decisions) > 1:
        lines += ["", f"all {len(report.decisions)} decisions of request {report.decision.request_id}, eldest first:"]
        lines += [f"  {_history(each)}" for each in report.decisions]
    return [*lines, *([f"note: {report.note}"] if report.note else [])]


def sentence(report: DecisionReport) -> str:
    """Return why that rank was chosen, what the next best would have cost, and whether the prediction held."""
    decision = report.decision
    parts = [_cause(decision), *_alternative(decision), _held(decision, report.outcome)]
    return _sentence(decision, "went", parts)


def _sentence(decision: Decision, verb: str, parts: Sequence[str]) -> str:
    phase = "" if decision.phase == "whole" else f" ({decision.phase})"
    length = f"{decision.isl_tokens} tokens" if decision.isl_tokens else "a prompt that was not encoded,"
    subject = f"Request {decision.request_id}{phase}, {length} for {decision.model},"
    return f"{subject} {verb} to {_name(decision.chosen)} because {'; '.join(parts)}."


def _cause(decision: Decision) -> str:
    if decision.reason in _CAUSES:
        return _CAUSES[decision.reason]
    if len(decision.candidates) == 1:
        return "there was no other candidate"
    if decision.runner_up is None or decision.margin is None:
        return f"seed {decision.seed} drew it" if decision.reason == "draw" else "it had the fewest active requests"
    runner_up = decision.candidates[decision.runner_up]
    if decision.margin == 0:
        return f"seed {decision.seed} broke the tie with {_name(runner_up)}"
    if decision.margin < 0:
        return f"the temperature's draw passed over {_name(runner_up)}"
    term, more = deciding_term(decision, runner_up)
    if more <= 0:
        return f"the factor for its constraints is smaller than at {_name(runner_up)}, the next best"
    return f"its {term} counts {more:.1f} ms less than at {_name(runner_up)}, the next best"


def _alternative(decision: Decision) -> Iterator[str]:
    if decision.runner_up is None or not decision.margin or not decision.chosen.is_weighed:
        return
    runner_up, unit = decision.candidates[decision.runner_up], _unit(decision)
    costs = f"{runner_up.terms.cost:.1f} against {decision.chosen.terms.cost:.1f}{unit}"
    change = "more" if decision.margin > 0 else "less"
    yield f"{_name(runner_up)} would have cost {abs(decision.margin):.1f}{unit} {change} in all, {costs}"


def deciding_term(decision: Decision, runner_up: Candidate) -> tuple[str, float]:
    """Return the term that makes most of the difference to the runner-up, without its unit, and the difference.

    The difference is in ms, times the term's weight, before the multiplier of constraints.
    """
    chosen, other = decision.chosen.terms, runner_up.terms
    weights = _term_weights(decision)
    more = {
        name: weight * (getattr(other, f"{name}_ms") - getattr(chosen, f"{name}_ms"))
        for name, weight in weights.items()
    }
    term = max(more, key=lambda name: more[name])
    return term, more[term]


def _term_weights(decision: Decision) -> dict[str, float]:
    """Return the weight of each addend: the cost is their weighted sum, times the multiplier.

    The weight of the time to the own first token follows from a candidate's cost; 1 if none has such a time.
    """
    weight = 1.0
    for terms in (each.terms for each in decision.candidates):
        first_ms, rest_ms = (
            sum(getattr(terms, f"{name}_ms") for name, each in ADDENDS.items() if each.until_first == is_first)
            for is_first in (True, False)
        )
        if first_ms > 0:
            weight = (terms.cost / terms.constraint_multiplier - rest_ms) / first_ms
            break
    return {name: weight if each.until_first else 1.0 for name, each in ADDENDS.items()}


def _held(decision: Decision, outcome: Outcome | None) -> str:
    if outcome is None:
        return "its outcome is not known"
    if outcome.outcome != "ok":
        return f"it ended as {_ended(outcome)}"
    miss = misses(decision, outcome).cached_tokens
    if miss is None:
        return "there is no count of cached tokens to compare the prediction with"
    counts = f"{predicted_cached_tokens(decision)} cached tokens predicted, {outcome.cached_tokens} reported"
    if abs(miss) < decision.block_size:
        return f"the prediction held, {counts}"
    return f"the prediction was {abs(miss)} tokens too {'high' if miss > 0 else 'low'}, {counts}"


# ------------------------------------------------------------------------------------------------------- the table


def table(decision: Decision) -> list[str]:
    """Return a row for each candidate, cheapest first; then how costs add up, notes, and refused ranks."""
    terms = _shown_terms(decision)
    ranked = sorted(decision.candidates, key=lambda candidate: candidate.terms.cost)
    columns = [[name, *cells] for name, blank, cells in _columns(decision, ranked, terms) if set(cells) != {blank}]
    return [
        *aligned([*zip(*columns, strict=True)]),
        *([_legend(decision, terms)] if terms else []),
        *(f"{_name(each)}  {note}" for each in ranked for note in _notes(each)),
        *(f"{each.worker_id}/{each.dp_rank}  refused: {each.reason}" for each in decision.excluded),
        *([] if decision.endpoint in PROMPT_ENDPOINTS else [_BY_LOAD]),
        *([] if decision.action == "admit" else [f"it is not predicted to meet its targets there: {decision.action}"]),
    ]


def _notes(candidate: Candidate) -> Iterator[str]:
    if lost := candidate.terms.overlap_lost_blocks:
        yield f"lacks room, and will evict {lost:.0f} blocks before it computes the prompt"
    if candidate.trust_reason:
        yield f"{candidate.trust}: {candidate.trust_reason}"


def _columns(
    decision: Decision, ranked: Sequence[Candidate], terms: Mapping[str, float]
) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yield each column's name, its blank, and its cells; a column that has only blanks is left out (None: never)."""
    yield "", None, ["*" if each is decision.chosen else "" for each in ranked]
    yield "rank", None, [_name(each) for each in ranked]
    if decision.chosen.is_weighed:
        costs = [each.terms for each in ranked]
        yield f"cost{_unit(decision)}", None, [f"{each.cost:.1f}" for each in costs]
        for term, weight in terms.items():
            yield f"{term} ms", None, [f"{weight * getattr(each, f'{term}_ms'):.1f}" for each in costs]
        yield "credit blocks", "0.0", [f"{each.overlap_credit_blocks:.1f}" for each in costs]
        yield "multiplier", "1.00", [f"{each.constraint_multiplier:.2f}" for each in costs]
    yield "gpu blocks", None, [str(each.overlap_blocks[0]) for each in ranked]
    yield "expected blocks", None, [str(each.expected_blocks) for each in ranked]
    yield "ttft ms", "-", [_ms(each.predicted_ttft_s) for each in ranked]
    yield "itl ms", "-", [_ms(each.predicted_itl_s) for each in ranked]
    yield "trust", None, [each.trust for each in ranked]


def _shown_terms(decision: Decision) -> dict[str, float]:
    """Return the weights of the terms that are not zero for all candidates."""
    terms = [each.terms for each in decision.candidates if decision.chosen.is_weighed]
    weights = _term_weights(decision).items()
    return {name: weight for name, weight in weights if any(getattr(each, f"{name}_ms") for each in terms)}


def _unit(decision: Decision) -> str:
    """Return the unit of costs, after a space; a user's mode names none."""
    return " ms" if decision.cost_unit == "ms" else ""


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _legend(decision: Decision, terms: Mapping[str, float]) -> str:
    weights = {weight: [name for name, each in terms.items() if each == weight] for weight in terms.values()}
    counted = [f"{', '.join(names)} counted {weight:g} times" for weight, names in weights.items() if weight != 1]
    is_multiplied = any(each.terms.constraint_multiplier != 1 for each in decision.candidates)
    how = "".join(f" ({each})" for each in counted) + ", multiplied" * is_multiplied
    return f"cost: the sum of the terms behind it{how}; the lowest wins"


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return the lines of a table: its first `left` columns are aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    cells = ([side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows)
    return ["  ".join(each).rstrip() for each in cells]


# ----------------------------------------------------------------------------------------------------- the outcome


def _outcome_lines(report: RequestReport) -> list[str]:
    decision, outcome = report.decision, report.outcome
    if outcome is None:
        return ["outcome         not known"]
    missed = misses(decision, outcome, report.decisions[0].decision.now_s if report.decisions else None)
    cached = "not reported" if outcome.cached_tokens is None else f"{outcome.cached_tokens} reported"
    missing = missed.cached_tokens or 0
    error = f", {abs(missing)} {'fewer' if missing > 0 else 'more'} than predicted" if missing else ""
    first = "unknown" if outcome.ttft_s is None else f"{1e3 * outcome.ttft_s:.1f} ms"
    late = "" if missed.ttft_s is None else f" ({_late(missed.ttft_s, decision)})"
    whole = "unknown" if outcome.duration_s is None else f"{1e3 * outcome.duration_s:.1f} ms"
    return [
        f"outcome         {_ended(outcome)}",
        f"cached tokens   {predicted_cached_tokens(decision)} predicted, {cached}{error}",
        f"first token     {first}{late}",
        f"whole answer    {whole}, {'unknown' if outcome.output_tokens is None else outcome.output_tokens} tokens",
    ]


def _late(late_s: float, decision: Decision) -> str:
    target = "predicted" if decision.ttft_target_s is None else f"its target of {decision.ttft_target_s:g} s"
    return f"{1e3 * abs(late_s):.1f} ms {'earlier' if late_s < 0 else 'later'} than {target}"


def _history(report: DecisionReport) -> str:
    decision, outcome = report.decision, report.outcome
    ended = "open" if outcome is None else _ended(outcome)
    phase = "" if decision.phase == "whole" else f" {decision.phase}"
    return f"{decision.decision_id}{phase}: {_name(decision.chosen)}, chosen by {decision.reason}: {ended}"


def _ended(outcome: Outcome) -> str:
    return f"{outcome.outcome}, {outcome.error}" if outcome.error else outcome.outcome


def _name(candidate: Candidate) -> str:
    return f"{candidate.worker_id}/{candidate.dp_rank}"
