"""A decision in words, from its own terms and nothing else."""

from kv_protocol.decision import Candidate, CostTerms, Decision


def explain(decision: Decision) -> str:
    """Return a few sentences that say who won, why, and by how much."""
    return "\n".join([_opening(decision), *map(_line, _by_cost(decision)), *_closing(decision)])


def _opening(decision: Decision) -> str:
    chosen = decision.chosen
    share = f"{_device(chosen)} of {decision.reusable_blocks} reusable blocks"
    holds = "holds" if chosen.overlap_source == "index" else "by what was routed to it holds"
    return (
        f"Request {decision.request_id}: {decision.isl_tokens} tokens for {decision.model}, policy {decision.policy}. "
        f"It went to {_name(chosen)}, which {holds} {share} ({_percent(decision, chosen)}){_awaited(chosen)}."
    )


def _line(candidate: Candidate) -> str:
    terms = candidate.terms
    beside = _awaited(candidate)
    if candidate.trust != "EXACT":
        beside += f"; {candidate.trust} ({candidate.trust_reason})"
    return (
        f"  {_name(candidate)}: cost {terms.cost:.1f} = prefill {terms.prefill_blocks:.1f} "
        f"(after a credit of {terms.overlap_credit_blocks:.1f}) + decode {terms.decode_blocks:.1f}"
        f" + requests {terms.request_blocks:.1f} + history {terms.history_blocks:.1f} blocks{beside}"
    )


def _awaited(candidate: Candidate) -> str:
    more = candidate.expected_blocks - _device(candidate)
    return f"; {more} more are on their way there" if more else ""


def _closing(decision: Decision) -> list[str]:
    closing = [f"  {each.worker_id}/{each.dp_rank}: not eligible, {each.reason}" for each in decision.excluded]
    if decision.policy == "round-robin":
        closing.append("It was this rank's turn; costs had no say.")
    elif decision.runner_up is None or decision.margin_blocks is None:
        closing.append("There was no other candidate.")
    else:
        closing.append(_margin(decision, decision.candidates[decision.runner_up], decision.margin_blocks))
    return closing


def _margin(decision: Decision, runner_up: Candidate, margin: float) -> str:
    if margin == 0:
        return f"{_name(runner_up)} costs the same; seed {decision.seed} broke the tie."
    if margin < 0:
        return f"{_name(runner_up)} was cheaper by {-margin:.1f} blocks; the temperature's draw passed it over."
    cause = _cause(decision.chosen.terms, runner_up.terms)
    return f"The runner-up, {_name(runner_up)}, costs {margin:.1f} blocks more: {cause}."


def _cause(chosen: CostTerms, runner_up: CostTerms) -> str:
    more = {
        "prefill": runner_up.prefill_blocks - chosen.prefill_blocks,
        "decode": runner_up.decode_blocks - chosen.decode_blocks,
        "requests": runner_up.request_blocks - chosen.request_blocks,
        "history": runner_up.history_blocks - chosen.history_blocks,
    }
    term = max(more, key=more.__getitem__)
    credit = f", its credit {runner_up.overlap_credit_blocks:.1f} against {chosen.overlap_credit_blocks:.1f}"
    return f"mostly {term}, {more[term]:+.1f}{credit if term == 'prefill' else ''}"


def _by_cost(decision: Decision) -> list[Candidate]:
    return sorted(decision.candidates, key=lambda candidate: candidate.terms.cost)


def _device(candidate: Candidate) -> int:
    return candidate.overlap_blocks[0]


def _percent(decision: Decision, candidate: Candidate) -> str:
    return f"{_device(candidate) / decision.reusable_blocks:.0%}" if decision.reusable_blocks else "nothing to reuse"


def _name(candidate: Candidate) -> str:
    return f"{candidate.worker_id}/{candidate.dp_rank}"
