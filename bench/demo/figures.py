"""What the demonstration shows of a run: rows of its table, and a sentence. Pure.

Times to first token (TTFT) are measured at the client; its process, the router and the engines share this machine's
cores. A quantile of them is shown if no process was late by more than `LATE_SHARE` of it, at the quantile of the
event-loop lag that `LAG_QUANTILES` has for it. Of 100 requests p99 would be a single one, so the tail is p90.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.report import imbalance, percentile
from bench.streaming_client import Measured
from router.decision.policies import MODES

BLOCK_SIZE = 32
SPEED = 0.5
"""Simulated seconds in a second: the slower the engines, the less it matters that this machine is late."""
LAG_QUANTILES = {0.50: 0.90, 0.90: 0.99}
LATE_SHARE = 0.1


class Run(NamedTuple):
    """One mode's run. `lags_s`: the lag of the process that had the most, by quantile, in seconds of this machine."""

    mode: str
    measured: Sequence[Measured]
    lags_s: Mapping[float, float]
    cpu_s: Mapping[str, float]
    explanation: str

    @property
    def answered(self) -> list[Measured]:
        """The requests without an error."""
        return [each for each in self.measured if not each.error]

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that came from a cache."""
        return sum(each.cached_tokens for each in self.answered)

    @property
    def hit_rate(self) -> float:
        """Their share of all prompt tokens."""
        return self.saved_tokens / max(1, sum(each.prompt_tokens for each in self.answered))

    def ttft_ms(self, quantile: float) -> float | None:
        """Return this quantile in simulated milliseconds; None if the machine was too busy to measure it."""
        ttft_s = percentile([each.ttft_s for each in self.answered], quantile)
        return ttft_s * SPEED * 1000 if self.lags_s[LAG_QUANTILES[quantile]] <= LATE_SHARE * ttft_s else None

    @property
    def sentence(self) -> str:
        """What a reader should remember."""
        ttft_ms = self.ttft_ms(0.50)
        reused = f"{self.mode}: {self.hit_rate:.0%} of the prompt tokens came from a cache"
        if ttft_ms is None:
            return f"{reused}; this machine was too busy to measure the time to first token."
        return f"{reused}, and the median time to first token was {ttft_ms:.0f} simulated ms."


def rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a name, and a cell for each run."""
    return [
        ("requests", [f"{len(run.measured)}" for run in runs]),
        ("errors", [f"{len(run.measured) - len(run.answered)}" for run in runs]),
        ("hit rate", [f"{run.hit_rate:.1%}" for run in runs]),
        *((f"TTFT p{q * 100:.0f}, simulated ms", [_ttft(run, q) for run in runs]) for q in LAG_QUANTILES),
        ("tokens saved", [f"{run.saved_tokens:,}" for run in runs]),
        ("imbalance (max / mean)", [f"{_imbalance(run):.2f}" for run in runs]),
        ("overlap predicted exactly", [_exact(run) for run in runs]),
        ("CPU router, s", [f"{run.cpu_s['router']:.1f}" for run in runs]),
        ("CPU nats-server, s", [f"{run.cpu_s['nats-server']:.1f}" for run in runs]),
        ("CPU workers, s", [f"{run.cpu_s['workers']:.1f}" for run in runs]),
        ("event-loop lag p90 / p99, simulated ms", [_lags(run) for run in runs]),
    ]


def _ttft(run: Run, quantile: float) -> str:
    ttft_ms = run.ttft_ms(quantile)
    return "not measured" if ttft_ms is None else f"{ttft_ms:.0f}"


def _imbalance(run: Run) -> float:
    requests = [(each.sent_s, each.worker, each.prompt_tokens - each.cached_tokens) for each in run.answered]
    return imbalance(requests, workers=len({each.worker for each in run.answered}))


def _exact(run: Run) -> str:
    if not MODES[run.mode].reads_overlap:
        return "not asked for"
    exact = sum(each.predicted_blocks * BLOCK_SIZE == each.cached_tokens for each in run.answered)
    return f"{exact} of {len(run.measured)}"


def _lags(run: Run) -> str:
    return "<= " + " / ".join(f"{run.lags_s[q] * SPEED * 1000:.1f}" for q in LAG_QUANTILES.values())
