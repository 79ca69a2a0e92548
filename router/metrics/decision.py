"""Metrics of decisions: duration by stage, reason of the choice, margin, overlap given up, cost terms of winners.

margin     the runner-up's cost minus the winner's
regret     the longest overlap of a candidate minus the winner's: the reuse that was given up for lower load
fallback   a decision that was not made as configured, and why
turn       a request left its first plan, and why
placement  whether a prefill or a decode worker computed a prompt, and why (`disaggregation.conditional`)
given up   for the term by which the candidate with the longest overlap cost most more than the winner; `not_cost` if it
           did not cost more: a session, a draw or a newcomer's share decided

Reading a decision's columns takes microseconds, so it is done at the scrape, for the last `SAMPLES_MAX` decisions
before it: a fair sample if there were more.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import get_args

import numpy as np

from kv_protocol.decision import ADDENDS
from kv_runtime.telemetry import Family, Mean, by_name, counter, histogram, summary
from router.decision.disaggregation import PLACEMENT_REASONS, PlacementReason
from router.decision.plan import REROUTES, Reroute
from router.decision.routing import DecisionLog, Routing
from router.decision.verdict import Reason, Verdict
from router.native import built

SAMPLES_MAX = 256
TERMS = ("overlap_credit", *ADDENDS["blocks"])
NOT_COST = "not_cost"
_CAUSES = tuple(dict.fromkeys((*ADDENDS["blocks"], *ADDENDS["ms"], NOT_COST)))
STAGES = ("parse", "tokenize", "hash", "match", "choose", "total")
"""The core measures the last three, of decisions that are carried out."""
REASONS: tuple[str, ...] = get_args(Reason)
APPROXIMATE = "approximate"
FALLBACKS = (APPROXIMATE, "not_encoded", "unmet_target")
"""`approximate`: the winner has no events, so its overlap was estimated from what was routed to it. `not_encoded`: the
prompt could not be encoded, so only load counted. `unmet_target`: the request was admitted, although no rank was
predicted to meet its targets."""
_STAGE_SECONDS = (1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0)


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


class DecisionMetrics:
    """Counts of decisions, each of `modes` from the start. The core has some of the sums; a scrape reads them there."""

    def __init__(self, routing: Routing, modes: tuple[str, ...]) -> None:
        self._core, self._modes = routing.state.core, modes
        self._stages = {stage: built.Histogram(_STAGE_SECONDS) for stage in STAGES[:3]}
        self.parse = self._stages["parse"]
        self.tokenized = self._stages["tokenize"].observe
        """Record the seconds that encoding a prompt took."""
        self.hashed = self._stages["hash"].observe
        """Record the seconds that hashing a prompt's blocks took; from any thread."""
        self._fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))
        self._reroutes = Counter(dict.fromkeys(REROUTES, 0))
        self._placements = Counter(dict.fromkeys(PLACEMENT_REASONS, 0))
        self._weighing = Weighing(routing.decisions)

    def fallback(self, reason: str) -> None:
        """Count a decision that was not made as configured; the core counts those that are `approximate`."""
        self._fallbacks[reason] += 1

    def rerouted(self, why: Reroute) -> None:
        """Count a request that leaves its first plan."""
        self._reroutes[why] += 1

    def placed(self, reason: PlacementReason) -> None:
        """Count a prompt by the reason of its placement."""
        self._placements[reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the metrics of decisions."""
        every = (*self._stages.values(), *self._core.stages())
        stages = [((stage,), seen) for stage, seen in zip(STAGES, every, strict=True)]
        yield histogram("decision_duration_seconds", "Duration of a stage of decisions", ("stage",), stages)
        found, regret, margin, margin_s, predicted_blocks, approximate = self._core.decided()
        counted = dict.fromkeys(product(self._modes, REASONS), 0) | dict(found)
        meaning = "Decisions, by mode of the policy and by what decided"
        yield counter("decisions", meaning, ("policy", "reason"), counted.items())
        for name, meaning, seen in (
            ("decision_margin_blocks", "Runner-up's cost minus the winner's, of costs in blocks", margin),
            ("decision_margin_seconds", "Runner-up's cost minus the winner's, of costs in ms", margin_s),
            ("regret_blocks", "Longest overlap of a candidate minus the winner's", regret),
        ):
            yield histogram(name, meaning, (), [((), seen)])
        yield from self._weighing.families()
        meaning = (
            "Blocks that the chosen rank was expected to hold because an earlier request's blocks were on their way"
        )
        yield counter("predicted_on_route_blocks", meaning, rows=[((), predicted_blocks)])
        self._fallbacks[APPROXIMATE] = approximate
        for name, meaning, counts in (
            ("request_turns", "Requests that left their first plan, by cause", self._reroutes),
            (
                "prefill_placements",
                "Prompts placed on decode workers or prefill workers by disaggregation.conditional, by cause",
                self._placements,
            ),
            ("fallback", "Decisions that were not made as configured, by cause", self._fallbacks),
        ):
            yield counter(name, meaning, ("reason",), by_name((), counts))
