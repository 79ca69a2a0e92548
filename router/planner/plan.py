"""How many workers of a model and role keep the objectives, and how well one more or fewer keeps them. Pure.

p and d are the mean learnt prefill and decode factors of the group's measured ranks, L is the mean length of the newest
answers. Names in capitals are constants of the reference engine (`router/native/costs.hpp`). k: ranks of all workers.

    prompts      M/G/k (below) with service time p * work of the prompt
                 share in time      P(p * FIRST_S + wait + service <= ttft_s)
                 utilisation        rate * mean service / k
    sequences    x = output tokens a second and rank, c = mean context + L / 2
                 ITL of n           d * (STEP_S + n * (STEP_SEQUENCE_S + c * STEP_KV_TOKEN_S)) = A + n * B
                 mean n             x * A / (1 - x * B), by Little's law n = x * ITL
                 limit              largest n with ITL of n <= itl_s, within `max_num_seqs` and the KV cache
                 share in time      P(a new sequence finds fewer than limit sequences)
                 utilisation        x / (limit / ITL of limit)
    advised      fewest workers with utilisation <= `UTILISATION_MAX` and both shares in time >= kept_ratio; an
                 objective that no number of workers keeps (the service alone takes longer) is not counted, and
                 is in `unreachable`

The core counts the offered load (`router/native/offered.hpp`): every routed attempt, of this router and its replicas.
A retry is work, too. A request that waits in the queue, or was refused, does not count.

The factors were measured while prompts and sequences shared the ranks as they do now. They are assumed to stay the same
with any number of workers. If a needed rate was never measured, it is in `unknown`, and no number is advised.

How the wait in a group of equal servers follows from its utilisation:

    prompts       Poisson arrivals, general service times, k servers, one line (M/G/k), approximated by
                  P(wait > t) = C(k, a) * exp(-t / m),  m = E[S] (1 + c^2) / (2 k (1 - a / k))
                  C: Erlang's delay formula, a: offered work in servers, c: coefficient of variation of S.
                  Source: Lee and Longton 1959, and Whitt, "Approximations for the GI/G/m queue", Production and
                  Operations Management 2 (1993), 2.1 and 2.4: the wait of M/M/k times (1 + c^2) / 2, and an exponential
                  tail.
    sequences     a rank serves all of its sequences at once: as in M/G/infinity their number is Poisson.
                  Source: Kleinrock, "Queueing Systems", volume 1, 3.4.

One line means that a request goes to the rank that is free first. A router that prefers the rank with the longest
prefix makes some requests wait longer: the shares are upper bounds.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from typing import Literal, NamedTuple, cast

from kv_protocol.fleet import Role
from router.fleet.registry import RANKS_MAX
from router.native import built

_SPREADS = 10.0
"""Standard deviations from the mean beyond which a Poisson number's probability is taken as 0 or 1."""
SLOT_S: float = built.SLOT_S
Unknown = Literal["prefill_factor", "decode_factor", "output_tokens"]
Limit = Literal["utilisation", "ttft", "itl"]
Reason = Literal["utilisation", "ttft", "itl", "least", "idle", "unknown"]
"""Why not fewer workers: the limit that one fewer would break. `least`: one worker suffices; `idle`: no request came;
`unknown`: a rate was never measured."""
UTILISATION_MAX = 0.85
"""How busy advised workers may be: the rest is for bursts that end before an autoscaler has added a worker."""

ServiceTimes = tuple[tuple[float, int], ...]
"""Seconds of service, and how many requests need them."""


def mean_s(times: ServiceTimes) -> float:
    """Return the mean time of service; 0 without requests."""
    return sum(seconds * count for seconds, count in times) / max(1, sum(count for _, count in times))


def begun_and_served_within(times: ServiceTimes, servers: int, rate_per_s: float, within_s: float) -> float:
    """Return the share of requests that are served `within_s` seconds after their arrival; 0 if too many arrive."""
    service_s, requests = mean_s(times), sum(count for _, count in times)
    busy = rate_per_s * service_s
    if busy >= servers:
        return 0.0
    blocked = 1.0
    for each in range(1, servers + 1):
        blocked = busy * blocked / (each + busy * blocked)
    delayed = blocked / (1.0 - busy / servers * (1.0 - blocked))  # Erlang's C
    spread = sum(count * (seconds / service_s - 1) ** 2 for seconds, count in times) / requests if service_s else 0.0
    mean_wait_s = service_s * (1.0 + spread) / (2.0 * (servers - busy))
    share = 0.0
    for seconds, count in times:
        left_s = within_s - seconds
        if left_s >= 0.0:
            late = delayed * math.exp(-left_s / mean_wait_s) if mean_wait_s else 0.0
            share += count / requests * (1.0 - late)
    return share


def poisson_at_most(mean: float, most: int) -> float:
    """Return the probability that a Poisson number with this mean is `most` or less."""
    spread = _SPREADS * math.sqrt(mean) + _SPREADS
    if most < 0 or mean > most + spread:
        return 0.0
    if mean <= 0.0 or most > mean + spread:
        return 1.0
    logarithm = math.log(mean)
    return min(1.0, sum(math.exp(n * logarithm - mean - math.lgamma(n + 1)) for n in range(most + 1)))


class Group(NamedTuple):
    """The workers of one model and role: what an autoscaler scales."""

    model: str
    role: Role


class OfferedLoad(NamedTuple):
    """The requests of `covered_s` seconds, their mean context, and the reference engine's time for their prompts."""

    covered_s: float
    requests: int = 0
    uncached_tokens: int = 0
    context_tokens: float = 0.0
    prompts: ServiceTimes = ()

    @property
    def requests_per_s(self) -> float:
        """Mean rate of routed attempts."""
        return self.requests / self.covered_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Mean rate of prompt tokens that workers have to compute."""
        return self.uncached_tokens / self.covered_s


def offered(core: built.Core, window_s: float, now_s: float, began_s: float) -> defaultdict[Group, OfferedLoad]:
    """Return each group's load in the window; the core counts since `began_s`. A load without requests is empty."""
    first_slot = int(now_s / SLOT_S) - max(1, round(window_s / SLOT_S)) + 1
    covered_s = max(SLOT_S, now_s - max(first_slot * SLOT_S, began_s))
    loads = defaultdict[Group, OfferedLoad](lambda: OfferedLoad(covered_s))
    for (model, role), requests, uncached_tokens, context_tokens, times in core.offered(first_slot):
        context = context_tokens / requests
        loads[Group(model, cast("Role", role))] = OfferedLoad(
            covered_s, requests, uncached_tokens, context, tuple(times)
        )
    return loads


class Objectives(NamedTuple):
    """The share `kept_ratio` of requests is to have a TTFT within `ttft_s`, and of sequences an ITL within `itl_s`."""

    ttft_s: float
    itl_s: float
    kept_ratio: float


class Rates(NamedTuple):
    """The learnt rates of a group; None: never measured."""

    prefill_factor: float | None = None
    decode_factor: float | None = None
    output_tokens: float | None = None


class Size(NamedTuple):
    """Workers that take new work, their ranks, and what a rank can hold; 0: no limit is known."""

    workers: int
    ranks_per_worker: int = 1
    sequences_max: int = 0
    kv_tokens_max: int = 0


class Capacity(NamedTuple):
    """What one worker can do; None: unknown, or not its role. `sequences`: at once, within the ITL objective."""

    prefill_tokens_per_s: float | None
    output_tokens_per_s: float | None
    sequences: int | None


class Prediction(NamedTuple):
    """Utilisation and shares in time with `workers` workers; None: not the group's role, or unknown."""

    workers: int
    utilisation_ratio: float | None
    ttft_within_ratio: float | None
    itl_within_ratio: float | None


class _Sequences(NamedTuple):
    """The sequences of one rank: the ITL of n is fixed_s + n * each_s; up to `limit` keep the objective."""

    fixed_s: float
    each_s: float
    limit: int

    @property
    def tokens_per_s(self) -> float:
        return self.limit / (self.fixed_s + self.limit * self.each_s) if self.limit else 0.0

    def within(self, tokens_per_s: float) -> float:
        """Return the share of sequences that find fewer than `limit` others at a rank with this load."""
        spare = 1.0 - tokens_per_s * self.each_s
        return poisson_at_most(tokens_per_s * self.fixed_s / spare, self.limit - 1) if spare > 0.0 else 0.0


class GroupPlan:
    """The plan of one group.

    output_tokens_per_s   tokens of answers that its workers have to produce; None: unknown, or not their role
    predicted             predictions with one worker fewer, as now, and with one more; none for 0 workers
    advised_workers       None: a rate that it depends on is in `unknown`
    unreachable           objectives that no number of workers keeps
    """

    def __init__(self, group: Group, size: Size, load: OfferedLoad, rates: Rates, objectives: Objectives) -> None:
        self.group, self.size, self.load, self.rates, self._objectives = group, size, load, rates, objectives
        prefill_factor, decode_factor, tokens = rates
        decodes = group.role != "prefill"
        self._prefills = group.role in ("prefill", "aggregated") or load.uncached_tokens > 0
        needed: dict[Unknown, bool] = {
            "prefill_factor": self._prefills, "decode_factor": decodes, "output_tokens": decodes
        }  # fmt: skip
        self.unknown = tuple(name for name, is_so in needed.items() if is_so and getattr(rates, name) is None)
        self._prompts: ServiceTimes = ()
        self._sequences: _Sequences | None = None
        if self._prefills and prefill_factor is not None:
            self._prompts = tuple((prefill_factor * each, count) for each, count in load.prompts)
        self.output_tokens_per_s = load.requests_per_s * tokens if decodes and tokens is not None else None
        if decodes and decode_factor is not None and tokens is not None:
            self._sequences = self._sequences_of_a_rank(decode_factor, tokens)
        now = size.workers
        self.predicted = tuple(self._predict(workers) for workers in (now - 1, now, now + 1) if workers > 0)
        self.worker_capacity = self._capacity()
        self.advised_workers, self.reason, self.unreachable = self._advice()

    def _sequences_of_a_rank(self, decode_factor: float, tokens: float) -> _Sequences:
        context, size = self.load.context_tokens + tokens / 2, self.size
        fixed_s = decode_factor * built.STEP_S
        each_s = decode_factor * (built.STEP_SEQUENCE_S + context * built.STEP_KV_TOKEN_S)
        limits = [math.floor((self._objectives.itl_s - fixed_s) / each_s)]
        if size.sequences_max:
            limits.append(size.sequences_max)
        if size.kv_tokens_max:
            limits.append(math.floor(size.kv_tokens_max / max(1.0, context)))
        return _Sequences(fixed_s, each_s, max(0, min(limits)))

    def _advice(self) -> tuple[int | None, Reason, tuple[Limit, ...]]:
        if not self.load.requests:
            return 1, "idle", ()
        if self.unknown:
            return None, "unknown", ()
        most = max(1, RANKS_MAX // self.size.ranks_per_worker)
        unreachable = self._failing(most)

        def failing(workers: int) -> list[Limit]:
            return [limit for limit in self._failing(workers) if limit not in unreachable]

        advised = 1 + bisect_left(range(1, most), True, key=lambda workers: not failing(workers))  # noqa: FBT003
        fewer = failing(advised - 1) if advised > 1 else []
        return advised, fewer[0] if fewer else "least", unreachable

    def _failing(self, workers: int) -> tuple[Limit, ...]:
        """Return the limits that this number of workers breaks."""
        found, kept_ratio = self._predict(workers), self._objectives.kept_ratio
        fails: dict[Limit, bool] = {
            "utilisation": (found.utilisation_ratio or 0.0) > UTILISATION_MAX,
            "ttft": found.ttft_within_ratio is not None and found.ttft_within_ratio < kept_ratio,
            "itl": found.itl_within_ratio is not None and found.itl_within_ratio < kept_ratio,
        }
        return tuple(limit for limit, is_broken in fails.items() if is_broken)

    def _capacity(self) -> Capacity:
        ranks, factor, load = self.size.ranks_per_worker, self.rates.prefill_factor, self.load
        prefill, sequences = None, self._sequences
        if self._prefills and factor is not None:
            prompt_s = factor * mean_s(load.prompts)
            tokens = load.uncached_tokens / load.requests if load.requests else 0.0
            prefill = ranks * (tokens / prompt_s if prompt_s else 1.0 / (factor * built.PREFILL_TOKEN_S))
        if sequences is None:
            return Capacity(prefill, None, None)
        return Capacity(prefill, ranks * sequences.tokens_per_s, ranks * sequences.limit)

    def _predict(self, workers: int) -> Prediction:
        ranks = workers * self.size.ranks_per_worker
        utilisations = list[float]()
        ttft = itl = None
        if (prompts := self._prompts) and self.rates.prefill_factor is not None:
            rate, first_s = self.load.requests_per_s, self.rates.prefill_factor * built.FIRST_S
            ttft = begun_and_served_within(prompts, ranks, rate, self._objectives.ttft_s - first_s)
            utilisations.append(rate * mean_s(prompts) / ranks)
        if (sequences := self._sequences) is not None and self.output_tokens_per_s is not None:
            each = self.output_tokens_per_s / ranks
            itl = sequences.within(each)
            if sequences.limit:
                utilisations.append(each / sequences.tokens_per_s)
        return Prediction(workers, max(utilisations, default=None), ttft, itl)
