"""Two workloads on which routers by prefix pile up work at one worker, and how evenly it was spread.

    hot prompt   short conversations that all begin with the one system prompt; they begin as a Poisson process
    agents       sessions one after the other ask, wait for the answer, think, and ask on; all begin with the one system
                 prompt, and each session has one request at a time

spread        most uncached tokens of a worker over their mean over all workers, in windows of 10 s by time of arrival;
              1 is even. Windows in which the fleet computed less than a quarter of the busiest one's do not count.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import NamedTuple

from bench.report import WINDOW_S
from bench.routing.figures import Slo, figures
from bench.routing.synthetic import SyntheticShape, synthetic_trace
from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from bench.routing.virtual_fleet import FollowUp, RequestFigures, VirtualFleet, VirtualFleetShape
from router.decision.policy import CostParameters, Policy

KV_TOKENS = 700_000
"""Of one worker's cache."""
_QUIET_SHARE = 0.25
_COST = CostParameters()


HOT_PROMPT = SyntheticShape(
    sessions=900,
    turns=3.0,
    systems=1,
    system_tokens=8192,
    question_tokens=600.0,
    answer_tokens=150.0,
    think_s=5.0,
    session_rate=12.0,
)


class Agents(NamedTuple):
    """How many sessions are at work at a time and in all, and what each of their turns is made of."""

    sessions: int = 400
    concurrent: int = 48
    turns: int = 8
    think_s: float = 1.0
    system_tokens: int = 8192
    turn_tokens: float = 768.0
    answer_tokens: float = 128.0


class Workload(NamedTuple):
    """Requests that come by themselves, and those that follow the answer to another."""

    requests: list[TraceRequest]
    follow_ups: Mapping[tuple[int, ...], FollowUp]


def hot_prompt(shape: SyntheticShape, seed: int) -> Workload:
    """Return the same conversations for the same seed."""
    return Workload(synthetic_trace(shape, seed), {})


def agents(shape: Agents, seed: int) -> Workload:
    """Return the same sessions for the same seed; `concurrent` begin at once, each end lets another one begin."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    fresh = count()
    system = _blocks(fresh, shape.system_tokens)
    lanes = [
        [each for _ in range(lane, shape.sessions, shape.concurrent) for each in _session(shape, draw, fresh, system)]
        for lane in range(min(shape.concurrent, shape.sessions))
    ]
    follow_ups = {
        before.block_ids: FollowUp(draw.expovariate(1 / shape.think_s), then)
        for lane in lanes
        for before, then in pairwise(lane)
    }
    first = [lane[0]._replace(arrival_s=draw.random() * shape.think_s) for lane in lanes]
    return Workload(sorted(first, key=lambda request: request.arrival_s), follow_ups)


def _session(
    shape: Agents, draw: random.Random, fresh: Iterator[int], system: tuple[int, ...]
) -> Iterator[TraceRequest]:
    known = system
    for _ in range(shape.turns):
        request = _request(draw, fresh, known, 0.0, shape.turn_tokens, shape.answer_tokens)
        yield request
        known = request.block_ids[: request.isl_tokens // TRACE_BLOCK_TOKENS]


def _blocks(fresh: Iterator[int], tokens: int) -> tuple[int, ...]:
    return tuple(next(fresh) for _ in range(-(-tokens // TRACE_BLOCK_TOKENS)))


def _request(
    draw: random.Random, fresh: Iterator[int], known: tuple[int, ...], at_s: float, own: float, answer: float
) -> TraceRequest:
    own_tokens = _length(draw, own)
    block_ids = (*known, *_blocks(fresh, own_tokens))
    isl_tokens = len(known) * TRACE_BLOCK_TOKENS + own_tokens
    return TraceRequest(at_s, isl_tokens, _length(draw, answer), block_ids)


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.expovariate(1 / mean)))


def spreads(outcomes: Sequence[RequestFigures], workers: int) -> list[float]:
    """Return the spread of every window that counts, in the order of time."""
    windows: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for each in outcomes:
        windows[int(each.arrival_s // WINDOW_S)][each.worker] += each.isl_tokens - each.cached_tokens
    totals = {window: tokens.total() for window, tokens in windows.items()}
    quiet_tokens = max(totals.values(), default=0) * _QUIET_SHARE
    return [
        max(windows[window].values()) * workers / total
        for window, total in sorted(totals.items())
        if total > quiet_tokens
    ]


class Hotness(NamedTuple):
    """One run: `spread` is the mean over its windows, `worst_spread` the highest."""

    requests: int
    hit_rate: float
    spread: float
    worst_spread: float
    windows: int
    ttft_p50_s: float
    ttft_p99_s: float


def workloads(seed: int) -> dict[str, Workload]:
    """Return both, by name."""
    return {"hot prompt": hot_prompt(HOT_PROMPT, seed), "agents": agents(Agents(), seed)}


def play(workload: Workload, mode: str, *, workers: int, seed: int, cost: CostParameters = _COST) -> Hotness:
    """Play a workload on a fleet and return how hot it became; `cost` are the weights of mode kv."""
    fleet = VirtualFleet(
        VirtualFleetShape(workers, KV_TOKENS),
        Policy(mode=mode, parameters=cost),
        workload.requests,
        seed=seed,
        follow_ups=workload.follow_ups,
    )
    outcomes = fleet.run()
    found, windows = figures(outcomes, workers=workers, slo=Slo()), spreads(outcomes, workers)
    p50_s, _, p99_s = found.ttft_s
    spread = sum(windows) / len(windows)
    return Hotness(len(outcomes), found.hit_rate, spread, max(windows), len(windows), p50_s, p99_s)
