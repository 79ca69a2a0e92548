"""Recorded requests played through simulated engines under a policy, in virtual time.

They arrive when they were decided, whatever the fleet does: a client whose next request waited for an answer does not
wait longer here. Caches are empty at first, so the first `WARM` of the requests are played and not counted. Ranks
neither join nor leave.

The engines are fitted to the recorded fleet. The router learns two factors of each rank from its decisions and their
outcomes: how slow it is with prompts, and with tokens. It learnt them of the recorded fleet, and it learns them of the
simulated one when the recorded requests are played under the recorded policy. Each of `ROUNDS` rounds scales the
engines' times of prompts and of tokens by (recorded factor / simulated factor), so that both agree in the end. A rank
with few measurements is drawn towards the mean of all ranks.

    of prompts    request_base_s, prompt_token_s, context_floor_s, token_s, attention_pair_s
    of tokens     base_s, kv_token_s, sequence_s
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.routing.trace import TraceRequest, at_rate
from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from bench.side_by_side import play_side_by_side
from bench.what_if.recorded import JournalUnfit, Recorded, speeds_of
from router.decision.policy import Policy
from router.decision.state import RateFactors
from worker_agent.engines.simulated.timing import EngineTiming

ROUNDS = 3
REQUESTS = 1000
"""At most this many requests are played to compare the factors."""
_DOUBT = 16.0
_PREFILL = ("request_base_s", "prompt_token_s", "context_floor_s", "token_s", "attention_pair_s")
_DECODE = ("base_s", "kv_token_s", "sequence_s")
_SCALE_MAX = 64.0

Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """The engines' timings; `left`: the largest ratio, 1 or more, of recorded factors and those with these timings."""

    timings: tuple[EngineTiming, ...]
    left: float
    measurements: int
    """Measurements of the recorded fleet; 0: the timings are the prior."""


Play = Callable[[Sequence[EngineTiming]], list[RateFactors]]
"""Plays the recorded policy with engines of these timings; returns the speeds that the router learns."""


def fitted(prior: EngineTiming, recorded: Sequence[RateFactors], play: Play) -> Fit:
    """Return timings with which `play` shows the recorded speeds."""
    measurements = sum(each.prefills + each.decodes for each in recorded)
    timings = [prior] * len(recorded)
    if not measurements:
        return Fit(tuple(timings), 1.0, 0)
    wanted = _believed(recorded)
    scales = np.ones_like(wanted)
    for _ in range(ROUNDS):
        scales = np.clip(scales * wanted / _believed(play(timings)), 1 / _SCALE_MAX, _SCALE_MAX)
        timings = [_timing(prior, *scale) for scale in scales.tolist()]
    ratios = wanted / _believed(play(timings))
    return Fit(tuple(timings), float(np.maximum(ratios, 1 / ratios).max()), measurements)


def _believed(speeds: Sequence[RateFactors]) -> Floats:
    """Return each rank's factors of prompts and of tokens; those with few measurements are near the mean of all."""
    factors = np.array([(each.prefill, each.decode) for each in speeds])
    counts = np.array([(each.prefills, each.decodes) for each in speeds])
    totals = counts.sum(axis=0)
    means: Floats = np.where(totals > 0, (factors * counts).sum(axis=0) / np.maximum(totals, 1), 1.0)
    believed: Floats = means + (factors - means) * counts / (counts + _DOUBT)
    return believed


def _timing(prior: EngineTiming, prefill: float, decode: float) -> EngineTiming:
    changed = {name: getattr(prior, name) * prefill for name in _PREFILL}
    changed |= {name: getattr(prior, name) * decode for name in _DECODE}
    return msgspec.structs.replace(prior, **changed)


WARM = 0.1
SEED = 1
_RESERVE_BLOCKS = 8


class Played(NamedTuple):
    """One run: the figures of each counted request, in the order of arrival."""

    arrival_s: Floats
    end_s: Floats
    worker: Floats
    isl_tokens: Floats
    cached_tokens: Floats
    ttft_s: Floats
    itl_s: Floats


class Stage(NamedTuple):
    """What all policies are played on: the requests and the fleet."""

    requests: list[TraceRequest]
    shape: VirtualFleetShape
    fit: Fit


def staged(recorded: Recorded, prior: EngineTiming, kv_blocks: int = 0) -> Stage:
    """Return the stage of a journal: its requests, and engines that are fitted to its fleet.

    Raises:
        JournalUnfit: there are no requests, or a request does not fit into a rank's cache.
    """
    requests = recorded.trace()
    fleet = recorded.fleet
    assert fleet is not None, "a journal with requests has a fleet"
    seq_len = max(each.isl_tokens + each.osl_tokens for each in requests)
    descriptions = fleet.descriptions(kv_blocks, seq_len)
    smallest = min(each.total_kv_blocks for each in descriptions)
    if seq_len // fleet.block_size + _RESERVE_BLOCKS > smallest:
        raise JournalUnfit(f"a request of {seq_len} tokens does not fit into a rank of {smallest} KV blocks")
    shape = VirtualFleetShape(descriptions, id_tokens=fleet.block_size)
    play = partial(_learnt, requests[:REQUESTS], shape, fleet.policy)
    fit = fitted(prior, speeds_of(recorded.learnt, fleet.ranks), play)
    return Stage(requests, shape._replace(timings=fit.timings), fit)


def _learnt(
    requests: Sequence[TraceRequest], shape: VirtualFleetShape, policy: Policy, timings: Sequence[EngineTiming]
) -> list[RateFactors]:
    fleet = VirtualFleet(shape._replace(timings=tuple(timings)), policy, requests, seed=SEED)
    fleet.run()
    return speeds_of(fleet.state, [engine.rank for engine in fleet.engines])


class Cell(NamedTuple):
    """A policy at a load: arrivals come `load` times as fast as recorded."""

    name: str
    policy: Policy
    load: float = 1.0


def play(stage: Stage, cell: Cell) -> Played:
    """Play the requests under the policy."""
    requests = at_rate(stage.requests, cell.load)
    outcomes = VirtualFleet(stage.shape, cell.policy, requests, seed=SEED).run()
    ordered = sorted(outcomes, key=lambda each: each.number)[int(WARM * len(outcomes)) :]
    rows = [
        (
            *(each.arrival_s, each.arrival_s + each.e2e_s, each.worker),
            *(each.isl_tokens, each.cached_tokens, each.ttft_s, each.itl_s),
        )
        for each in ordered
    ]
    return Played(*np.array(rows).T)


def play_all(stage: Stage, cells: Sequence[Cell], jobs: int) -> dict[Cell, Played]:
    """Play all cells, `jobs` at a time; return the runs in the order of `cells`."""
    found = dict(play_side_by_side(partial(play, stage), cells, jobs))
    return {cell: found[cell] for cell in cells}
