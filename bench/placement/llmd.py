"""llm-d's weighted scorers with the weights of its guides, written from their documentation; none of its code is here.

    prefix    share of the prompt's blocks that the worker holds, from its KV events        weight 3
    queue     (most - waiting) / (most - fewest), of requests that wait in the engines; 1 where all are equal      2
    cache     1 - share of the KV blocks that running requests use                                                 2
    choice    the greatest weighted sum; of equal ones the seed draws one

Queue and cache are the engines' own metrics, read every `SCRAPE_S`. Source: llm-d's guide for precise prefix-cache
routing (`precise-prefix-cache-scorer` 3.0, `kv-cache-utilization-scorer` 2.0, `queue-scorer` 2.0, `max-score-picker`);
formulas of the scorers: Gateway API Inference Extension, plugin documentation. The interval of 50 ms: its
`--refresh-metrics-interval`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kv_protocol.decided import RouteRequest
from kv_protocol.splitmix import choice_index
from router.decision.policies import Candidates, Choice
from router.decision.policy import Policy

SCRAPE_S = 0.05


class EngineMetrics(NamedTuple):
    """What an engine reports: requests that wait, and the share (0..1) of its KV blocks that requests use."""

    waiting: int
    kv_usage: float


class ScorerWeights(NamedTuple):
    """The weights of the three scorers."""

    prefix: float = 3.0
    queue: float = 2.0
    cache: float = 2.0


DEFAULTS = ScorerWeights()


class WeightedScorers:
    """The scorers, and the metrics as they were read last; `scrape` returns the engines' in the order of the ranks."""

    def __init__(self, scrape: Callable[[], Sequence[EngineMetrics]], weights: ScorerWeights = DEFAULTS) -> None:
        self._scrape = scrape
        self._weights = weights
        self._metrics: Sequence[EngineMetrics] = ()
        self._scraped_s = 0.0

    def choose(self, candidates: Candidates, request: RouteRequest, _policy: Policy, seed: int) -> Choice:
        """Return the worker with the greatest score."""
        now_s = candidates.view.now_s
        if not self._metrics or now_s - self._scraped_s >= SCRAPE_S:
            self._metrics, self._scraped_s = self._scrape(), now_s
        scores = self.scores(candidates, request)
        best = [place for place, score in enumerate(scores) if score == max(scores)]
        return Choice(best[choice_index(seed, len(best))], "load" if len(best) == len(scores) else "overlap")

    def scores(self, candidates: Candidates, request: RouteRequest) -> list[float]:
        """Return the weighted sum of each candidate, by the metrics that were read last."""
        weights, blocks = self._weights, max(1, len(request.sequence_hashes) // 8)
        held = candidates.columns.overlap[0].tolist()
        metrics = [self._metrics[place] for place in candidates.rank_indices]
        waiting = [each.waiting for each in metrics]
        most, fewest = max(waiting), min(waiting)
        return [
            weights.prefix * held[place] / blocks
            + weights.queue * ((most - each.waiting) / (most - fewest) if most > fewest else 1.0)
            + weights.cache * (1.0 - each.kv_usage)
            for place, each in enumerate(metrics)
        ]
