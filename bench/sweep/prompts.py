"""The prompts and arrivals of a run: token ids, the same for the same inputs, whatever the fleet.

    prompt   `prefix_share` of its tokens are one of `prefixes` texts, drawn at random; the rest is drawn for it alone
    ids      32..126: printable ASCII in the byte tokenizer, ordinary tokens in the vocabularies of models

Prompts are ids, so that their length is exact at any endpoint, without its tokenizer. Runs with different lengths,
shares or loads share no prompt: at an endpoint that goes on between runs, no run finds what another one left.
"""

from collections.abc import Iterator
from random import Random

from bench.sweep.plan import RunInputs

_IDS = range(32, 127)


def prompts(inputs: RunInputs) -> Iterator[list[int]]:
    """Yield the prompts of the warm-up and then of the run, without an end."""
    draw = Random(f"{inputs.seed} {_workload(inputs)}")  # noqa: S311 - a workload, not a secret
    prefix_tokens = round(inputs.isl_tokens * inputs.prefix_share)
    prefixes = [draw.choices(_IDS, k=prefix_tokens) for _ in range(inputs.prefixes)]
    while True:
        yield draw.choice(prefixes) + draw.choices(_IDS, k=inputs.isl_tokens - prefix_tokens)


def arrivals_s(inputs: RunInputs) -> Iterator[float]:
    """Yield when each request is sent, in seconds from the first; `rate` is above 0."""
    draw, at_s = Random(f"{inputs.seed} arrivals {_workload(inputs)}"), 0.0  # noqa: S311 - as above
    while True:
        yield at_s
        at_s += draw.expovariate(inputs.rate)


def _workload(inputs: RunInputs) -> str:
    return f"{inputs.isl_tokens} {inputs.osl_tokens} {inputs.prefix_share:g} {inputs.load}"
