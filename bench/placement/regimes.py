"""The regimes: a workload, a fleet, two cache sizes. Sizes are those of a run at scale 1; the load multiplies arrivals.

    regime           requests                                                                          workers
    chat             users in a closed loop, six turns, four system prompts                                  4
    documents        questions about long documents, some asked about more often                             4
    agents           growing contexts; each answer starts two tool calls at once                             4
    nothing shared   no two prompts share a block                                                            4
    hot prefix       short conversations that all begin with one long system prompt                          4
    mooncake         the beginning of the Mooncake conversation trace, requests of one moment spread         4
    two speeds       chat; two workers need 2.5 times as long as the others                                  4
    host tier        documents; evicted blocks go to a host tier of twice the GPU's blocks                   4
    one long prompt  one prompt of 60,000 tokens on an idle fleet, then 600 short ones in 30 s               8
    restart          one long system prompt, few requests; then the router starts anew, and many come        4
    no room ENGINE   chat without thinking; the caches are too small for the requests in flight              4

Engines schedule as TensorRT-LLM does (GUARANTEED_NO_EVICT); in the regimes `no room` also as vLLM, which preempts, and
as SGLang, which computes prompts first and retracts.

Checks: the share of the short prompts that the long one's worker gets is more than 0; the greatest share of a worker in
the requests after the restart is less than 1.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest, at_rate, load_trace, spread
from bench.routing.virtual_fleet import RequestFigures, VirtualFleetShape
from bench.routing.virtual_router import describe, scaled
from bench.routing.workloads import Agents, SyntheticShape, Workload, agents, blocks, following, synthetic_trace
from worker_agent.engines.simulated.scheduling import SGLANG, TRTLLM, VLLM, Scheduling
from worker_agent.engines.simulated.timing import H200_8B

LOADS = (0.5, 1.0, 1.5)
CACHES = ("small", "large")
LONG_TOKENS = 60_000
_RESTART_AFTER = 1 / 3


class Sizing(NamedTuple):
    """What a workload is made for: seed, load, and how large it is; `trace` is the Mooncake trace."""

    seed: int
    load: float
    scale: float = 1.0
    trace: Path | None = None

    def of(self, number: float) -> int:
        """Return the number at this scale, 1 or more."""
        return max(1, round(number * self.scale))


Check = Callable[[Sequence[RequestFigures], Workload], float]
"""Computes the share that is checked, from the outcomes and the workload."""


class Regime(NamedTuple):
    """A regime. `kv_tokens`: a worker's, by cache size. `restarts`: the router does, after a third of the requests."""

    make: Callable[[Sizing], Workload]
    kv_tokens: tuple[int, int]
    workers: int = 4
    slowdowns: tuple[float, ...] = (1.0,)
    scheduling: Scheduling = TRTLLM
    host_share: float = 0.0
    restarts: bool = False
    check: Check | None = None
    needs_trace: bool = False

    def fleet(self, cache: str, workload: Workload) -> VirtualFleetShape:
        """Return the fleet for a cache size."""
        kv_tokens = self.kv_tokens[CACHES.index(cache)]
        host_blocks = round(kv_tokens // TRACE_BLOCK_TOKENS * self.host_share)
        return VirtualFleetShape(
            (describe(kv_tokens),) * self.workers,
            tuple(scaled(H200_8B, each) for each in self.slowdowns),
            scheduling=self.scheduling,
            host_blocks=host_blocks,
            restart_s=restart_s(workload) if self.restarts else None,
        )


def restart_s(workload: Workload) -> float:
    """Return when the router of a workload starts anew."""
    return workload.requests[round(len(workload.requests) * _RESTART_AFTER)].arrival_s


def chat(sizing: Sizing, users: int = 112, think_s: float = 0.2) -> Workload:
    """Return sessions like those of the recording of four live engines, with thinking time."""
    shape = Agents(
        sessions=sizing.of(168),
        concurrent=sizing.of(users * sizing.load),
        turns=6,
        think_s=think_s,
        systems=4,
        system_tokens=1024,
        turn_tokens=500.0,
        answer_tokens=100.0,
    )
    return agents(shape, sizing.seed)


def tool_agents(sizing: Sizing) -> Workload:
    """Return sessions whose contexts grow, with parallel tool calls."""
    shape = Agents(
        sessions=sizing.of(40),
        concurrent=sizing.of(20 * sizing.load),
        turns=5,
        think_s=0.2,
        system_tokens=2048,
        turn_tokens=1500.0,
        answer_tokens=80.0,
        tool_calls=2,
    )
    return agents(shape, sizing.seed)


def documents(sizing: Sizing) -> Workload:
    """Return questions about 24 documents of 8,000 to 32,000 tokens: about the n-th, 1 / n of those about the first."""
    draw, fresh = random.Random(sizing.seed), count()  # noqa: S311 - a workload, not a secret
    known = [blocks(fresh, draw.randint(8_000, 32_000)) for _ in range(24)]
    often = [1 / number for number in range(1, len(known) + 1)]
    requests, now_s = list[TraceRequest](), 0.0
    for number in range(sizing.of(480)):
        (document,) = draw.choices(known, often)
        asked = following(draw, fresh, document, 200.0, 100.0)
        requests.append(asked._replace(arrival_s=now_s, session=f"s{number}"))
        now_s += draw.expovariate(8.0 * sizing.load)
    return Workload(requests, {})


def hot_prefix(sizing: Sizing) -> Workload:
    """Return conversations that begin with one system prompt."""
    shape = SyntheticShape(
        sessions=sizing.of(180),
        turns=3.0,
        systems=1,
        system_tokens=8192,
        question_tokens=600.0,
        answer_tokens=150.0,
        think_s=3.0,
        session_rate=6.0 * sizing.load,
    )
    return Workload(synthetic_trace(shape, sizing.seed), {})


def mooncake(sizing: Sizing) -> Workload:
    """Return the beginning of the trace."""
    assert sizing.trace is not None, "the regime is skipped without a trace"
    requests = load_trace(sizing.trace, sizing.of(400))
    return Workload(at_rate(spread(requests, sizing.seed), sizing.load), {})


def one_long_prompt(sizing: Sizing) -> Workload:
    """Return the long prompt, and short ones from 1 s later on."""
    short = _poisson(sizing, 600, 20.0, (200.0, 30.0)).requests
    fresh = count(1 + max(each for request in short for each in request.block_ids))
    long = TraceRequest(0.0, LONG_TOKENS, 10, blocks(fresh, LONG_TOKENS), "long")
    return Workload([long, *(each._replace(arrival_s=each.arrival_s + 1.0) for each in short)], {})


def after_restart(sizing: Sizing) -> Workload:
    """Return requests that begin with one system prompt of 8,192 tokens: 2 a second, after the restart 24.

    Thus only some workers hold the prompt when the router forgets what they do.
    """
    requests = _poisson(sizing, 720, 24.0, (400.0, 120.0), system_tokens=8192).requests
    few = round(len(requests) * _RESTART_AFTER)
    slow = [each._replace(arrival_s=each.arrival_s * 12.0) for each in requests[:few]]
    late_s = slow[-1].arrival_s - requests[few - 1].arrival_s
    return Workload([*slow, *(each._replace(arrival_s=each.arrival_s + late_s) for each in requests[few:])], {})


def _poisson(
    sizing: Sizing, requests: int, per_s: float, means: tuple[float, float], system_tokens: int = 0
) -> Workload:
    draw, fresh = random.Random(sizing.seed), count()  # noqa: S311 - a workload, not a secret
    system, made, now_s = blocks(fresh, system_tokens), list[TraceRequest](), 0.0
    for number in range(sizing.of(requests)):
        one = following(draw, fresh, system, *means)
        made.append(one._replace(arrival_s=now_s, session=f"s{number}"))
        now_s += draw.expovariate(per_s * sizing.load)
    return Workload(made, {})


def share_beside_the_long_prompt(outcomes: Sequence[RequestFigures], _workload: Workload) -> float:
    """Return the share of the short requests that the long prompt's worker got."""
    (busy,) = (each.worker for each in outcomes if each.isl_tokens == LONG_TOKENS)
    short = [each.worker for each in outcomes if each.isl_tokens != LONG_TOKENS]
    return short.count(busy) / len(short)


def greatest_share_after_restart(outcomes: Sequence[RequestFigures], workload: Workload) -> float:
    """Return the greatest share of a worker in the requests after the restart."""
    after = [each.worker for each in outcomes if each.arrival_s >= restart_s(workload)]
    return max(Counter(after).values()) / len(after)


REGIMES: dict[str, Regime] = {
    "chat": Regime(chat, (48_000, 400_000)),
    "documents": Regime(documents, (100_000, 400_000)),
    "agents": Regime(tool_agents, (64_000, 400_000)),
    "nothing shared": Regime(lambda sizing: _poisson(sizing, 480, 16.0, (4000.0, 150.0)), (64_000, 400_000)),
    "hot prefix": Regime(hot_prefix, (64_000, 400_000)),
    "mooncake": Regime(mooncake, (200_000, 700_000), needs_trace=True),
    "two speeds": Regime(lambda sizing: chat(sizing, 64), (48_000, 400_000), slowdowns=(1.0, 1.0, 2.5, 2.5)),
    "host tier": Regime(documents, (60_000, 120_000), host_share=2.0),
    "one long prompt": Regime(one_long_prompt, (80_000, 400_000), workers=8, check=share_beside_the_long_prompt),
    **{
        f"no room {engine}": Regime(lambda sizing: chat(sizing, think_s=0.0), (32_000, 64_000), scheduling=scheduling)
        for engine, scheduling in (("trtllm", TRTLLM), ("vllm", VLLM), ("sglang", SGLANG))
    },
    "restart": Regime(after_restart, (48_000, 400_000), restarts=True, check=greatest_share_after_restart),
}
