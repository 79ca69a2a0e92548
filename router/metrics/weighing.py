"""Metrics of cost terms: what winners cost, and which term outweighed overlap.

    regret of a decision     the longest overlap of a candidate minus the winner's
    was given up for         the term by which that candidate cost most more than the winner; `not_cost` if it did not
                             cost more: a session, a draw or a newcomer's share decided

Reading a decision's columns takes microseconds, so it is done at the scrape, for the last `SAMPLES_MAX` decisions
before it: a fair sample if there were more.
"""

from collections.abc import Iterator

import numpy as np

from kv_protocol.decision import ADDENDS
from kv_runtime.telemetry import Family, Mean, by_name, counter, summary
from router.decision.routing import DecisionLog
from router.decision.verdict import Verdict

SAMPLES_MAX = 256
TERMS = ("overlap_credit", *ADDENDS["blocks"])
NOT_COST = "not_cost"
_CAUSES = tuple(dict.fromkeys((*ADDENDS["blocks"], *ADDENDS["ms"], NOT_COST)))


class Weighing:
    """Costs of winners, and causes of regret."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions, self._read_upto = decisions, decisions.added_total
        self._terms = {term: Mean() for term in TERMS}
        self._terms_in_ms = {term: Mean() for term in ADDENDS["ms"]}
        self._given_up_for = dict.fromkeys(_CAUSES, 0)

    def families(self) -> Iterator[Family]:
        """Yield the sums, including the decisions since the last call."""
        added_total = self._decisions.added_total
        for record in self._decisions.newest(min(SAMPLES_MAX, added_total - self._read_upto)):
            if record.verdict.has_costs:
                self._read(record.verdict)
        self._read_upto = added_total
        terms = [((term,), seen) for term, seen in self._terms.items()]
        meaning = "Terms of the winner's cost, of sampled decisions with costs in blocks"
        yield summary("cost_term_blocks", meaning, ("term",), terms)
        terms = [((term,), seen) for term, seen in self._terms_in_ms.items()]
        meaning = "Terms of the winner's cost, of sampled decisions with costs in ms"
        yield summary("cost_term_seconds", meaning, ("term",), terms)
        meaning = "Regret by the term that it was for, of sampled decisions"
        yield counter("regret_term_blocks", meaning, ("term",), by_name((), self._given_up_for))

    def _read(self, verdict: Verdict) -> None:
        unit = verdict.cost_unit
        won = verdict.terms(verdict.winner_at)
        if unit == "ms":
            for term, seen in self._terms_in_ms.items():
                seen.observe(getattr(won, f"{term}_ms") * 1e-3)
        else:
            for term, seen in self._terms.items():
                seen.observe(getattr(won, f"{term}_blocks"))
        if verdict.regret_blocks > 0:
            depths = verdict.overlap[0][verdict.rank_indices]
            longest = verdict.terms(int(np.argmax(depths)))
            names = {term: f"{term}_{unit}" for term in ADDENDS[unit]}
            excess = {term: getattr(longest, name) - getattr(won, name) for term, name in names.items()}
            most = max(excess, key=lambda term: excess[term])
            self._given_up_for[most if longest.cost > won.cost else NOT_COST] += verdict.regret_blocks
