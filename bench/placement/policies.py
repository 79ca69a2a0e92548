"""The policies that the bench compares, by name, and the rules of those that are no mode of ours.

kv                  mode kv as it is by default
kv-fcfs, kv-wspt    the same with our queue
predicted-ttft, least-loaded, power-of-two, round-robin        our other modes; the last three are other routers' too
dynamo              NVIDIA Dynamo's rule, `fewest_blocks`
dynamo-fcfs, dynamo-wspt                                       the same with its queue
sglang, session-hash, llm-d                                    rules of their own, below

Dynamo's queue (`--router-queue-threshold`, `--router-queue-policy`; off by default, as ours): a request waits while
others do, or while every worker has more than threshold x max_num_batched_tokens of uncached prompts before their
first token. When a first token comes or a request ends, waiting requests are placed among all workers until every
worker has so many again. fcfs: in the order of arrival; wspt: first the request with the fewest tokens that no worker
held when it came. Our queue with one tenant has the same rule (`router/queue/waiting.py`). The threshold here is 1.
Here, what workers hold is read anew whenever a request is placed; in Dynamo only after a wait of 10 s. Source:
ai-dynamo 1.6.1, help texts of the flags (`dynamo/common/configuration/groups/kv_router_args.py`, which allows no
lcfs); ai-dynamo/dynamo, `lib/kv-router/src/scheduling/queue.rs` at 00067c3 and
`docs/components/router/router-configuration.md` at 057096c.

The rules of other routers, written from their documentation; none of their code is here.

`CacheAware`: SGLang's router in its policy `cache_aware`.

    imbalanced   (most - fewest) > balance_abs_threshold and most > balance_rel_threshold * fewest, of requests that
                 are in flight at each worker: the worker with the fewest
    otherwise    the worker whose tree holds the longest prefix of the prompt, if that is a greater share of the prompt
                 than cache_threshold; else the worker with the smallest tree
    afterwards   the prompt is inserted into the chosen worker's tree, in either case

Source: the flags' help texts and defaults of sglang-router 0.3.2 (`python -m sglang_router.launch_router --help`); the
algorithm: the documentation of its successor (lightseekorg/smg, `docs/concepts/routing/cache-aware.md`).
vllm-router's `cache_aware` has the same rule and defaults (its help texts).

Unlike in those routers, trees consist of full blocks, not of characters. Trees are never cut: no regime has prompts of
more than max_tree_size, 67,108,864 characters. Which of several workers with equally long prefixes is chosen is not
documented: the seed draws one.

`WeightedScorers`: llm-d's, with the weights of its guides.

    prefix    share of the prompt's blocks that the worker holds, from its KV events        weight 3
    queue     (most - waiting) / (most - fewest), of requests that wait in the engines; 1 if all are equal         2
    cache     1 - share of the KV blocks that running requests use                                                 2
    choice    the greatest weighted sum; the seed draws one of equals

Queue and cache are the engines' own metrics, read every `SCRAPE_S`. Source: llm-d's guide for precise prefix-cache
routing (`precise-prefix-cache-scorer` 3.0, `kv-cache-utilization-scorer` 2.0, `queue-scorer` 2.0, `max-score-picker`);
formulas of the scorers: Gateway API Inference Extension, plugin documentation. The interval of 50 ms: its
`--refresh-metrics-interval`.

`fewest_blocks`: NVIDIA Dynamo's (its documentation of 1.6), with our tie-breaks.

    cost      max(0, (queued tokens + ISL) / B - blocks held) + the worker's active blocks with those of the request;
              a block on the host counts as 0.75, one on disk as 0.25 (its flags' defaults)
    choice    the lowest cost; the seed draws one of equals

`SessionHash`: vllm-router's policy `consistent_hash`.

    ring      160 points for each worker; a key belongs to the worker of the first point at or after its hash or, if no
              point is there, of the first point of all
    key       the session id of the request (a header), else its user, else its body

Load is not read. Source: vllm-router's README and flags (the policy), descriptions of it (160 virtual nodes a worker;
the key is looked for in headers, then in the body). Its hash function is another one; here it is BLAKE2b.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from bench.routing.trace import PrefixTree
from bench.routing.virtual_fleet import ModesOf
from bench.routing.virtual_router import NO_QUEUE, VirtualEngine, VirtualQueue
from kv_protocol.codec import unpack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.splitmix import choice_index
from router.decision.policies import MODES, Candidates, Choice, Mode
from router.decision.policy import Policy

_CACHE_THRESHOLD, _BALANCE_ABS_THRESHOLD, _BALANCE_REL_THRESHOLD = 0.3, 64, 1.5
"""The defaults of the flags of SGLang's router."""


class CacheAware:
    """SGLang's router after a start: a tree for each worker, empty at first."""

    def __init__(self) -> None:
        self._trees: dict[str, PrefixTree] = {}

    def choose(self, candidates: Candidates, request: RouteRequest, _policy: Policy, seed: int) -> Choice:
        """Return the choice; the prompt counts as routed there."""
        view = candidates.columns
        trees = [self._trees.setdefault(rank.worker_id, PrefixTree()) for rank in view.ranks]
        chain = unpack_u64(request.sequence_hashes)
        in_flight = view.active_requests.tolist()
        most, fewest = max(in_flight), min(in_flight)
        if most - fewest > _BALANCE_ABS_THRESHOLD and most > _BALANCE_REL_THRESHOLD * fewest:
            choice = Choice(in_flight.index(fewest), "load")
        else:
            choice = self._by_prefix(trees, chain, request, seed)
        trees[choice.winner].insert(chain)
        return choice

    def _by_prefix(self, trees: Sequence[PrefixTree], chain: Sequence[int], request: RouteRequest, seed: int) -> Choice:
        depths = [tree.depth(chain) for tree in trees]
        deepest = max(depths)
        if deepest * request.block_size > _CACHE_THRESHOLD * request.isl_tokens:
            holders = [place for place, depth in enumerate(depths) if depth == deepest]
            return Choice(holders[choice_index(seed, len(holders))], "overlap")
        sizes = [len(tree) for tree in trees]
        return Choice(sizes.index(min(sizes)), "load")


SCRAPE_S = 0.05


class EngineMetrics(NamedTuple):
    """What an engine reports: requests that wait, and the share (0..1) of its KV blocks that requests use."""

    waiting: int
    kv_usage: float


def fewest_blocks(candidates: Candidates, request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    """Return the worker with the fewest blocks to compute and in use."""
    ranks, own_blocks = candidates.columns, -(-request.isl_tokens // request.block_size)
    device, host, disk = ranks.overlap[:3]
    held = device + 0.75 * (host - device) + 0.25 * (disk - host)
    missing = (ranks.queued_tokens + request.isl_tokens) / request.block_size - held
    costs = (np.maximum(missing, 0.0) + ranks.active_blocks - ranks.shared_blocks + own_blocks).tolist()
    best = [place for place, cost in enumerate(costs) if cost == min(costs)]
    return Choice(best[choice_index(seed, len(best))], "load", costs=costs)


_PREFIX, _QUEUE, _CACHE = 3.0, 2.0, 2.0
"""The weights of the three scorers."""


class WeightedScorers:
    """The scorers, and the metrics as they were read last; `scrape` reads those of all ranks, in order."""

    def __init__(self, scrape: Callable[[], Sequence[EngineMetrics]]) -> None:
        self._scrape = scrape
        self._metrics: Sequence[EngineMetrics] = ()
        self._scraped_s = 0.0

    def choose(self, candidates: Candidates, request: RouteRequest, _policy: Policy, seed: int) -> Choice:
        """Return the worker with the greatest score."""
        now_s = candidates.columns.now_s
        if not self._metrics or now_s - self._scraped_s >= SCRAPE_S:
            self._metrics, self._scraped_s = self._scrape(), now_s
        scores = self.scores(candidates, request)
        best = [place for place, score in enumerate(scores) if score == max(scores)]
        return Choice(best[choice_index(seed, len(best))], "load" if len(best) == len(scores) else "overlap")

    def scores(self, candidates: Candidates, request: RouteRequest) -> list[float]:
        """Return the weighted sum of each candidate, by the metrics that were read last."""
        blocks = max(1, len(request.sequence_hashes) // 8)
        held = candidates.columns.overlap[0].tolist()
        metrics = [self._metrics[place] for place in candidates.rank_indices]
        waiting = [each.waiting for each in metrics]
        most, fewest = max(waiting), min(waiting)
        return [
            _PREFIX * held[place] / blocks
            + _QUEUE * ((most - each.waiting) / (most - fewest) if most > fewest else 1.0)
            + _CACHE * (1.0 - each.kv_usage)
            for place, each in enumerate(metrics)
        ]


VIRTUAL_NODES = 160


class SessionHash:
    """The ring, built anew when the workers change."""

    def __init__(self) -> None:
        self._workers: tuple[str, ...] = ()
        self._points: list[tuple[int, int]] = []

    def choose(self, candidates: Candidates, request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
        """Return the worker of the request's key."""
        workers = tuple(rank.worker_id for rank in candidates.columns.ranks)
        if workers != self._workers:
            self._workers = workers
            self._points = sorted(
                (_hash(f"{worker}:{node}".encode()), place)
                for place, worker in enumerate(workers)
                for node in range(VIRTUAL_NODES)
            )
        key = request.session_id.encode() or request.sequence_hashes or request.request_id.encode()
        at = bisect_left(self._points, (_hash(key), 0))
        return Choice(self._points[at % len(self._points)][1], "affinity")


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


class Placement(NamedTuple):
    """How requests are placed: a policy, the modes that it can name, made for a fleet's engines, and a queue."""

    policy: Policy
    modes_of: ModesOf = lambda _: MODES
    queue: VirtualQueue = NO_QUEUE


def metrics_of(engines: Sequence[VirtualEngine]) -> list[EngineMetrics]:
    """Return what the engines report now."""
    simulators = [engine.simulator for engine in engines]
    used = [each.pool().used_blocks / each.description.total_kv_blocks for each in simulators]
    return [EngineMetrics(engine.waiting_requests, share) for engine, share in zip(engines, used, strict=True)]


def _foreign(mode: str, make: Callable[[Sequence[VirtualEngine]], Mode]) -> Placement:
    """Return the placement by another router's rule, without our newcomers and predictions; `make` returns its mode."""
    policy = Policy(mode=mode, newcomers=False, predict_on_route=False)
    return Placement(policy, lambda engines: {mode: make(engines)})


_KV = Placement(Policy())
_DYNAMO = _foreign("dynamo", lambda _: Mode(fewest_blocks, reads_overlap=True, reads_load=True))

PLACEMENTS: dict[str, Placement] = {
    "kv": _KV,
    "kv-fcfs": _KV._replace(queue=VirtualQueue(1.0, "fcfs")),
    "kv-wspt": _KV._replace(queue=VirtualQueue(1.0, "wspt")),
    **{
        mode: Placement(Policy(mode=mode)) for mode in ("predicted-ttft", "least-loaded", "power-of-two", "round-robin")
    },
    "dynamo": _DYNAMO,
    "dynamo-fcfs": _DYNAMO._replace(queue=VirtualQueue(1.0, "fcfs")),
    "dynamo-wspt": _DYNAMO._replace(queue=VirtualQueue(1.0, "wspt")),
    "sglang": _foreign("sglang", lambda _: Mode(CacheAware().choose, reads_overlap=True, reads_load=True)),
    "session-hash": _foreign("session-hash", lambda _: Mode(SessionHash().choose)),
    "llm-d": _foreign(
        "llm-d", lambda engines: Mode(WeightedScorers(lambda: metrics_of(engines)).choose, reads_overlap=True)
    ),
}
