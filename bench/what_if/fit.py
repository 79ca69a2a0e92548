"""Engines as fast as those of a recorded fleet: a prior, scaled until the simulation shows the fleet's factors.

The router's rule learns two factors of a rank from its decisions and their outcomes: of prompts and of tokens. The
recorded fleet has them; so has a simulation of it, if the recorded requests are played under the recorded policy. Each
round scales the times of prompts and of tokens by (recorded factor / simulated factor): after `ROUNDS` both agree, with
all that the rule does not know (iterations, batches, the request's way) in its place. A rank with few measurements is
as the mean of all.

    of prompts    request_base_s, prompt_token_s, context_floor_s, token_s, attention_pair_s
    of tokens     base_s, kv_token_s, sequence_s
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from bench.what_if.recorded import RankSpeed
from worker_agent.engines.simulated.timing import EngineTiming

ROUNDS = 3
REQUESTS = 1000
"""Of so many requests at most the factors are compared."""
_DOUBT = 16.0
_PREFILL = ("request_base_s", "prompt_token_s", "context_floor_s", "token_s", "attention_pair_s")
_DECODE = ("base_s", "kv_token_s", "sequence_s")
_SCALE_MAX = 64.0


class Fit(NamedTuple):
    """The engines' timings, and the largest ratio of a simulated to a recorded factor that is left, 1 or more."""

    timings: tuple[EngineTiming, ...]
    left: float
    measurements: int
    """Of the recorded fleet; 0: the timings are the prior."""


Play = Callable[[Sequence[EngineTiming]], list[RankSpeed]]
"""Plays the recorded policy with engines of these timings; returns the speeds that the rule learns."""


def fitted(prior: EngineTiming, recorded: Sequence[RankSpeed], play: Play) -> Fit:
    """Return timings with which `play` shows the recorded speeds."""
    measurements = sum(each.prefills + each.decodes for each in recorded)
    timings = [prior] * len(recorded)
    if not measurements:
        return Fit(tuple(timings), 1.0, 0)
    prefill, decode = _believed(recorded)
    scales = [(1.0, 1.0)] * len(recorded)
    left = 1.0
    for _ in range(ROUNDS):
        simulated_prefill, simulated_decode = _believed(play(timings))
        ratios = [
            (prefill[at] / simulated_prefill[at], decode[at] / simulated_decode[at]) for at in range(len(recorded))
        ]
        left = max(max(each, 1 / each) for pair in ratios for each in pair)
        scales = [_scaled(scale, ratio) for scale, ratio in zip(scales, ratios, strict=True)]
        timings = [_timing(prior, *scale) for scale in scales]
    return Fit(tuple(timings), left, measurements)


def _believed(speeds: Sequence[RankSpeed]) -> tuple[list[float], list[float]]:
    """Return the factors of prompts and of tokens; those with few measurements are near the mean."""
    return (
        _toward_the_mean([(each.prefill, each.prefills) for each in speeds]),
        _toward_the_mean([(each.decode, each.decodes) for each in speeds]),
    )


def _toward_the_mean(factors: Sequence[tuple[float, int]]) -> list[float]:
    total = sum(count for _, count in factors)
    mean = sum(factor * count for factor, count in factors) / total if total else 1.0
    return [mean + (factor - mean) * count / (count + _DOUBT) for factor, count in factors]


def _scaled(scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[float, float]:
    prefill, decode = (
        min(max(one * other, 1 / _SCALE_MAX), _SCALE_MAX) for one, other in zip(scale, ratio, strict=True)
    )
    return prefill, decode


def _timing(prior: EngineTiming, prefill: float, decode: float) -> EngineTiming:
    changed = {name: getattr(prior, name) * prefill for name in _PREFILL}
    changed |= {name: getattr(prior, name) * decode for name in _DECODE}
    return msgspec.structs.replace(prior, **changed)
