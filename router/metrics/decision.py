"""Metrics of decisions: duration by stage, reason of the choice, margin, overlap given up.

margin     the runner-up's cost minus the winner's: small margins are decided by little
regret     the longest overlap of a candidate minus the winner's: what was given up for the sake of load
fallback   a decision or an answer that was not made as configured, and why
turn       a request took another way through the fleet than it began, and why
placement  where a prompt was computed, of those of which the configuration lets the fleet decide
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import get_args

from kv_runtime.telemetry import Count, Distribution, Family, counter, histogram
from router.decision.disaggregation import PLACEMENT_REASONS, PlacementReason
from router.decision.plan import REROUTES, Reroute
from router.decision.verdict import Reason, Verdict
from router.metrics.weighing import Weighing

STAGES = ("parse", "tokenize", "hash", "match", "choose", "total")
REASONS: tuple[str, ...] = get_args(Reason)
APPROXIMATE = "approximate"
FALLBACKS = (APPROXIMATE, "not_encoded", "unmet_target")
"""The winner has no events, so its overlap is what was routed to it; the prompt could not be encoded, so only load
counts; no rank is predicted to meet the targets, and the request was admitted all the same."""
_STAGE_SECONDS = (1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0)
_MARGIN_SECONDS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_BLOCKS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)


class DecisionMetrics:
    """Counts of decisions; `modes` exist from the start."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        self._stages = {stage: Distribution(_STAGE_SECONDS) for stage in STAGES}
        self.parse = self._stages["parse"]
        self.tokenized = self._stages["tokenize"].observe
        """A prompt was read in this many seconds."""
        self.hashed = self._stages["hash"].observe
        """A prompt's blocks were hashed in this many seconds; from any thread."""
        self._match, self._choose, self._all = (self._stages[stage] for stage in ("match", "choose", "total"))
        self._decisions = {at: Count() for at in product(modes, REASONS)}
        self._margin = Distribution(_BLOCKS)
        self._margin_s = Distribution(_MARGIN_SECONDS)
        self._regret = Distribution(_BLOCKS)
        self._on_their_way = 0
        self._fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))
        self._reroutes = Counter(dict.fromkeys(REROUTES, 0))
        self._placements = Counter(dict.fromkeys(PLACEMENT_REASONS, 0))
        self._weighing = Weighing()
        self._verdicts = self._weighing.verdicts

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """Distributions with observations to be settled."""
        return (*self._stages.values(), self._margin, self._margin_s, self._regret)

    def chosen(self, match_s: float, choose_s: float) -> None:
        """Record the durations of a decision's last two stages."""
        self._match.observe(match_s)
        self._choose.observe(choose_s)
        self._all.observe(match_s + choose_s)

    def decided(self, verdict: Verdict) -> None:
        """Count a decision that is carried out."""
        count = self._decisions.get((verdict.policy, verdict.reason)) or self._counted(verdict)
        count.value += 1
        self._regret.observe(verdict.regret_blocks)
        self._on_their_way += verdict.expected_blocks - verdict.overlap_blocks
        margin = verdict.margin
        if margin is not None:
            if verdict.is_timed:
                self._margin_s.observe(margin * 1e-3)
            else:
                self._margin.observe(margin)
        if verdict.trust == "FALLBACK":
            self._fallbacks[APPROXIMATE] += 1
        if verdict.has_costs:
            self._verdicts.append(verdict)

    def _counted(self, verdict: Verdict) -> Count:
        return self._decisions.setdefault((verdict.policy, verdict.reason), Count())

    def fallback(self, reason: str) -> None:
        """Count a deviation from the configuration; `decided` counts approximated overlaps."""
        self._fallbacks[reason] += 1

    def turned(self, why: Reroute) -> None:
        """Count a request that leaves its first plan."""
        self._reroutes[why] += 1

    def placed(self, reason: PlacementReason) -> None:
        """Count where a prompt is computed."""
        self._placements[reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the counters."""
        stages = [((stage,), seen) for stage, seen in self._stages.items()]
        yield histogram("decision_duration_seconds", "Duration of a stage of decisions", ("stage",), stages)
        decisions = [(at, float(count.value)) for at, count in self._decisions.items()]
        yield counter(
            "decisions", "Decisions, by mode of the policy and by what decided", ("policy", "reason"), decisions
        )
        for name, meaning, seen in (
            ("decision_margin_blocks", "Runner-up's cost minus the winner's, of costs in blocks", self._margin),
            ("decision_margin_seconds", "Runner-up's cost minus the winner's, of costs in ms", self._margin_s),
            ("regret_blocks", "Longest overlap of a candidate minus the winner's", self._regret),
        ):
            yield histogram(name, meaning, (), [((), seen)])
        yield from self._weighing.families()
        meaning = (
            "Blocks that the chosen rank was expected to hold because an earlier request's blocks were on their way"
        )
        yield counter("predicted_on_route_blocks", meaning, (), [((), float(self._on_their_way))])
        rows = [((why,), float(count)) for why, count in self._reroutes.items()]
        yield counter("request_turns", "Requests that left their first plan, by cause", ("reason",), rows)
        placements = [((reason,), float(count)) for reason, count in self._placements.items()]
        meaning = "Prompts placed on decode workers or prefill workers by disaggregation.conditional, by cause"
        yield counter("prefill_placements", meaning, ("reason",), placements)
        fallbacks = [((reason,), float(count)) for reason, count in self._fallbacks.items()]
        yield counter("fallback", "Decisions that were not made as configured, by cause", ("reason",), fallbacks)
