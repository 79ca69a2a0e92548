"""Explains a decision in words, from its terms only."""

from collections.abc import Iterator, Sequence

from kv_protocol.decision import ADDENDS, Candidate, CostTerms, CostUnit, Decision
from kv_protocol.openai.endpoints import PROMPT_ENDPOINTS

_UNTIL_FIRST = ("wait", "prefill", "lateness")
_AFTER_FIRST = tuple(term for term in ADDENDS["ms"] if term not in _UNTIL_FIRST)
_SENT = {
    "whole": "It {} to",
    "prefill": "Its prompt {} to",
    "decode": "What another worker prefilled {} to",
    "alone": "It {}, prompt and all, to",
}


def explain(decision: Decision, *, is_hypothetical: bool = False) -> str:
    """Return a few sentences: which rank won, why, and by how much. `is_hypothetical`: no request went there."""
    opening = _opening(decision, "would go" if is_hypothetical else "went")
    lines = [_line(candidate, decision.cost_unit) for candidate in _by_cost(decision)]
    return "\n".join([opening, *lines, *_closing(decision)])


def _opening(decision: Decision, verb: str) -> str:
    chosen = decision.chosen
    share = f"{_device(chosen)} of {decision.reusable_blocks} reusable blocks"
    holds = "holds" if chosen.overlap_source == "index" else "by what was routed to it holds"
    what = f", which {holds} {share} ({_percent(decision, chosen)}){_awaited(chosen)}" if chosen.is_weighed else ""
    length = f"{decision.isl_tokens} tokens" if decision.isl_tokens else "a prompt that was not encoded,"
    return (
        f"Request {decision.request_id}: {length} for {decision.model}, policy {decision.policy}. "
        f"{_SENT[decision.phase].format(verb)} {_name(chosen)}{what}."
    )


def _awaited(candidate: Candidate) -> str:
    more = candidate.expected_blocks - _device(candidate)
    return f"; {more} more are on their way there" if more else ""


def _line(candidate: Candidate, unit: CostUnit) -> str:
    weighed = f": {_terms(candidate.terms, unit)}" if candidate.is_weighed else " was a candidate"
    return f"  {_name(candidate)}{weighed}{'; '.join(['', *_notes(candidate)])}"


def _terms(terms: CostTerms, unit: CostUnit) -> str:
    times = f", times {terms.constraint_multiplier:.2f} for its constraints" if terms.constraint_multiplier != 1 else ""
    parts, credited = _addends(terms, ADDENDS[unit], unit), "after"
    if unit == "ms":
        first, credited = " + ".join(_addends(terms, _UNTIL_FIRST, unit)), "with"
        parts = [f"{_ttft_weight(terms):.1f} x ({first})"] if first else []
        parts += _addends(terms, _AFTER_FIRST, unit)
    total = f"cost {terms.cost:.1f} = {' + '.join(parts) or 0} {unit}{times}"
    return f"{total}, {credited} {terms.overlap_credit_blocks:.1f} blocks credited"


def _addends(terms: CostTerms, names: Sequence[str], unit: CostUnit) -> list[str]:
    """Return the addends that are not zero."""
    values = [(each, getattr(terms, f"{each}_{unit}")) for each in names]
    return [f"{each} {value:.1f}" for each, value in values if value]


def _ttft_weight(terms: CostTerms) -> float:
    """Return the weight of a request's own first token, which the cost was made with."""
    first_ms = terms.wait_ms + terms.prefill_ms + terms.lateness_ms
    rest_ms = sum(getattr(terms, f"{each}_ms") for each in _AFTER_FIRST)
    return (terms.cost / terms.constraint_multiplier - rest_ms) / first_ms if first_ms > 0 else 1.0


def _notes(candidate: Candidate) -> Iterator[str]:
    if candidate.is_weighed and candidate.expected_blocks > _device(candidate):
        yield f"{candidate.expected_blocks - _device(candidate)} more are on their way there"
    if candidate.terms.overlap_lost_blocks:
        lost = candidate.terms.overlap_lost_blocks
        yield f"it lacks room, and will evict {lost:.0f} more before it computes the prompt"
    if candidate.is_spilled:
        yield "no credit, since too much is queued there"
    if candidate.predicted_ttft_s is not None and candidate.predicted_itl_s is not None:
        first_ms, between_ms = 1e3 * candidate.predicted_ttft_s, 1e3 * candidate.predicted_itl_s
        yield f"predicted {first_ms:.0f} ms to the first token and {between_ms:.1f} ms between tokens"
    if candidate.trust != "EXACT":
        yield f"{candidate.trust} ({candidate.trust_reason})"


def _closing(decision: Decision) -> list[str]:
    closing = [] if decision.endpoint in PROMPT_ENDPOINTS else [_BY_LOAD]
    closing += [f"  {each.worker_id}/{each.dp_rank}: not eligible, {each.reason}" for each in decision.excluded]
    text = _REASONS.get(decision.reason)
    if text is not None:
        closing.append(text)
    if decision.runner_up is not None and decision.margin is not None:
        closing.append(_margin(decision, decision.candidates[decision.runner_up], decision.margin))
    elif text is None:
        closing.append(_unweighed(decision))
    if decision.action != "admit":
        closing.append(f"It is not predicted to meet its targets there: {decision.action}.")
    return closing


def _unweighed(decision: Decision) -> str:
    if len(decision.candidates) == 1:
        return "There was no other candidate."
    if decision.reason == "draw":
        return f"Seed {decision.seed} drew it; costs had no say."
    return "It had the fewest active requests of those that were compared; costs had no say."


_BY_LOAD = "An embedding reuses no KV prefix: its worker is chosen without a look at what is cached."
_REASONS = {
    "turn": "It was this rank's turn; costs had no say.",
    "pinned": "The caller named it.",
    "affinity": "The request's session is at home there.",
    "newcomer": "No rank has a block of the request, and newcomers had their share of such requests.",
    "predicted_ttft": "It is predicted to answer first.",
    "user": "A mode of the configuration chose it.",
}


def _margin(decision: Decision, runner_up: Candidate, margin: float) -> str:
    if margin < 0 and decision.reason != "draw":
        return f"{_name(runner_up)} would have cost {-margin:.1f} {decision.cost_unit} less."
    if margin == 0:
        return f"{_name(runner_up)} costs the same; seed {decision.seed} broke the tie."
    if margin < 0:
        less = f"{-margin:.1f} {decision.cost_unit}"
        return f"{_name(runner_up)} was cheaper by {less}; the temperature's draw passed it over."
    more = f"{margin:.1f} {decision.cost_unit}"
    return f"The runner-up, {_name(runner_up)}, costs {more} more: {_cause(decision, runner_up)}."


def _cause(decision: Decision, runner_up: Candidate) -> str:
    term, more = deciding_term(decision, runner_up)
    if decision.cost_unit == "ms":
        return f"mostly {term}, {more:+.1f} ms"
    chosen, other = decision.chosen.terms.overlap_credit_blocks, runner_up.terms.overlap_credit_blocks
    credit = f", its credit {other:.1f} against {chosen:.1f}" if term == "prefill" else ""
    return f"mostly {term}, {more:+.1f}{credit}"


def deciding_term(decision: Decision, runner_up: Candidate) -> tuple[str, float]:
    """Return the term that adds most to the runner-up's cost beyond the winner's, and its difference.

    The difference is in `cost_unit`, as it counts, before the multiplier of constraints.
    """
    chosen, other = decision.chosen.terms, runner_up.terms
    weights = term_weights(decision)
    fields = {name: f"{name}_{decision.cost_unit}" for name in weights}
    more = {name: weights[name] * (getattr(other, field) - getattr(chosen, field)) for name, field in fields.items()}
    term = max(more, key=lambda name: more[name])
    return term, more[term]


def term_weights(decision: Decision) -> dict[str, float]:
    """Return by each addend of the cost how often it counts: their weighted sum, times the multiplier, is the cost."""
    unit = decision.cost_unit
    weight = max(_ttft_weight(each.terms) for each in decision.candidates) if unit == "ms" else 1.0
    return {name: weight if unit == "ms" and name in _UNTIL_FIRST else 1.0 for name in ADDENDS[unit]}


def _by_cost(decision: Decision) -> list[Candidate]:
    return sorted(decision.candidates, key=lambda candidate: candidate.terms.cost)


def _device(candidate: Candidate) -> int:
    return candidate.overlap_blocks[0]


def _percent(decision: Decision, candidate: Candidate) -> str:
    return f"{_device(candidate) / decision.reusable_blocks:.0%}" if decision.reusable_blocks else "nothing to reuse"


def _name(candidate: Candidate) -> str:
    return f"{candidate.worker_id}/{candidate.dp_rank}"
