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

from kv_runtime.telemetry import Distribution, Family, by_name, counter, histogram
from router.decision.disaggregation import PLACEMENT_REASONS, PlacementReason
from router.decision.plan import REROUTES, Reroute
from router.decision.routing import Routing
from router.decision.verdict import Reason
from router.metrics.weighing import Weighing

STAGES = ("parse", "tokenize", "hash", "match", "choose", "total")
REASONS: tuple[str, ...] = get_args(Reason)
APPROXIMATE = "approximate"
FALLBACKS = (APPROXIMATE, "not_encoded", "unmet_target")
"""The winner has no events, so its overlap is what was routed to it; the prompt could not be encoded, so only load
counts; no rank is predicted to meet the targets, and the request was admitted all the same."""
_STAGE_SECONDS = (1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0)


class DecisionMetrics:
    """Counts of decisions; `modes` exist from the start. What the core sums up of them is read at the scrape."""

    def __init__(self, routing: Routing, modes: tuple[str, ...]) -> None:
        self._core, self._modes = routing.state.core, modes
        self._stages = {stage: Distribution(_STAGE_SECONDS) for stage in STAGES}
        self.parse = self._stages["parse"]
        self.tokenized = self._stages["tokenize"].observe
        """A prompt was read in this many seconds."""
        self.hashed = self._stages["hash"].observe
        """A prompt's blocks were hashed in this many seconds; from any thread."""
        self._match, self._choose, self._all = (self._stages[stage] for stage in ("match", "choose", "total"))
        self._fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))
        self._reroutes = Counter(dict.fromkeys(REROUTES, 0))
        self._placements = Counter(dict.fromkeys(PLACEMENT_REASONS, 0))
        self._weighing = Weighing(routing.decisions)

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """Distributions with observations to be settled."""
        return (*self._stages.values(),)

    def chosen(self, match_s: float, choose_s: float) -> None:
        """Record the durations of a decision's last two stages."""
        self._match.observe(match_s)
        self._choose.observe(choose_s)
        self._all.observe(match_s + choose_s)

    def fallback(self, reason: str) -> None:
        """Count a deviation from the configuration; the core counts approximated overlaps."""
        self._fallbacks[reason] += 1

    def rerouted(self, why: Reroute) -> None:
        """Count a request that leaves its first plan."""
        self._reroutes[why] += 1

    def placed(self, reason: PlacementReason) -> None:
        """Count where a prompt is computed."""
        self._placements[reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the counters."""
        stages = [((stage,), seen) for stage, seen in self._stages.items()]
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
            yield histogram(name, meaning, (), [((), Distribution(*seen))])
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
