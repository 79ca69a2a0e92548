"""Two workloads on which routers by prefix pile up work at one worker, and how evenly it was spread.

    hot prompt   short conversations that all begin with the one system prompt; they begin as a Poisson process
    agents       sessions one after the other ask, wait for the answer, think, and ask on; all begin with the one system
                 prompt, and each session has one request at a time

spread        most uncached tokens of a worker over their mean over all workers, in windows of 10 s by time of arrival;
              1 is even. Windows in which the fleet computed less than a quarter of the busiest one's do not count.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from bench.report import WINDOW_S
from bench.routing.figures import Slo, figures
from bench.routing.synthetic import SyntheticShape
from bench.routing.virtual_fleet import RequestFigures, VirtualFleet, VirtualFleetShape
from bench.routing.workloads import Agents, Workload, agents, hot_prompt
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
        Policy.current(mode=mode, parameters=cost),
        workload.requests,
        seed=seed,
        follow_ups=workload.follow_ups,
    )
    outcomes = fleet.run()
    found, windows = figures(outcomes, workers=workers, slo=Slo()), spreads(outcomes, workers)
    p50_s, _, p99_s = found.ttft_s
    spread = sum(windows) / len(windows)
    return Hotness(len(outcomes), found.hit_rate, spread, max(windows), len(windows), p50_s, p99_s)
