"""Metrics of decisions: duration by stage, reason of the choice, margin, overlap given up.

margin     the runner-up's cost minus the winner's
regret     the longest overlap of a candidate minus the winner's: the reuse that was given up for lower load
fallback   a decision that was not made as configured, and why
turn       a request left its first plan, and why
placement  whether a prefill or a decode worker computed a prompt, and why (`disaggregation.conditional`)
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import get_args

from kv_runtime.telemetry import Family, by_name, counter, histogram
from router.decision.disaggregation import PLACEMENT_REASONS, PlacementReason
from router.decision.plan import REROUTES, Reroute
from router.decision.routing import Routing
from router.decision.verdict import Reason
from router.metrics.weighing import Weighing
from router.native import built

STAGES = ("parse", "tokenize", "hash", "match", "choose", "total")
"""The core measures the last three, of decisions that are carried out."""
REASONS: tuple[str, ...] = get_args(Reason)
APPROXIMATE = "approximate"
FALLBACKS = (APPROXIMATE, "not_encoded", "unmet_target")
"""`approximate`: the winner has no events, so its overlap was estimated from what was routed to it. `not_encoded`: the
prompt could not be encoded, so only load counted. `unmet_target`: the request was admitted, although no rank was
predicted to meet its targets."""
_STAGE_SECONDS = (1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0)


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
