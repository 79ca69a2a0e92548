"""SGLang's router in its policy `cache_aware`, written from its documentation; none of its code is here.

    imbalanced   (most - fewest) > balance_abs_threshold and most > balance_rel_threshold * fewest, of requests that
                 are in flight at each worker: the worker with the fewest
    otherwise    the worker whose tree holds the longest prefix of the prompt, if that is a greater share of the prompt
                 than cache_threshold; else the worker with the smallest tree
    afterwards   the prompt is inserted into the chosen worker's tree, in either case
    eviction     every eviction_interval_secs each tree loses its least recently used leaves beyond max_tree_size

Source: the flags' help texts and defaults of sglang-router 0.3.2 (`python -m sglang_router.launch_router --help`); the
algorithm: the documentation of its successor (lightseekorg/smg, `docs/concepts/routing/cache-aware.md`).
vllm-router's `cache_aware` has the same rule and defaults (its help texts).

Not theirs: trees are of full blocks where theirs are of characters; a character is taken as a quarter of a token. Which
of several workers with equally long prefixes is chosen is not documented: the seed draws one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench.prefix_tree import PrefixTree
from kv_protocol.codec import unpack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.splitmix import choice_index
from router.decision.policies import Candidates, Choice
from router.decision.policy import Policy

CHARACTERS_PER_TOKEN = 4


class CacheAwareSettings(NamedTuple):
    """The flags, by their names and with their defaults."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_secs: float = 60.0
    max_tree_size: int = 67_108_864


DEFAULTS = CacheAwareSettings()


class CacheAware:
    """One life of that router: trees by worker, empty at first."""

    def __init__(self, settings: CacheAwareSettings = DEFAULTS) -> None:
        self._settings = settings
        self._trees: dict[str, PrefixTree] = {}
        self._evicted_s = 0.0

    def choose(self, candidates: Candidates, request: RouteRequest, _policy: Policy, seed: int) -> Choice:
        """Return the choice; the prompt counts as routed there."""
        view = candidates.columns
        trees = [self._trees.setdefault(rank.worker_id, PrefixTree()) for rank in view.ranks]
        self._evict(view.now_s, request.block_size)
        chain = unpack_u64(request.sequence_hashes)
        in_flight = view.active_requests.tolist()
        if self._is_imbalanced(in_flight):
            choice = Choice(in_flight.index(min(in_flight)), "load")
        else:
            choice = self._by_prefix(trees, chain, request, seed)
        trees[choice.winner].insert(chain)
        return choice

    def _is_imbalanced(self, in_flight: Sequence[int]) -> bool:
        most, fewest = max(in_flight), min(in_flight)
        settings = self._settings
        return most - fewest > settings.balance_abs_threshold and most > settings.balance_rel_threshold * fewest

    def _by_prefix(self, trees: Sequence[PrefixTree], chain: Sequence[int], request: RouteRequest, seed: int) -> Choice:
        depths = [tree.depth(chain) for tree in trees]
        deepest = max(depths)
        if deepest * request.block_size > self._settings.cache_threshold * request.isl_tokens:
            holders = [place for place, depth in enumerate(depths) if depth == deepest]
            return Choice(holders[choice_index(seed, len(holders))], "overlap")
        sizes = [len(tree) for tree in trees]
        return Choice(sizes.index(min(sizes)), "load")

    def _evict(self, now_s: float, block_size: int) -> None:
        if now_s - self._evicted_s < self._settings.eviction_interval_secs:
            return
        self._evicted_s = now_s
        for tree in self._trees.values():
            tree.evict(self._settings.max_tree_size // (block_size * CHARACTERS_PER_TOKEN))
