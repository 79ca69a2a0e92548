"""What is true of blocks, from tokens alone: names, held sets, and how much of a prompt a held set serves."""

from collections.abc import Iterable, Sequence
from functools import cache

from kv_protocol.events import TIERS, Tier
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from worker_agent.engines.simulated.blocks import named_block
from worker_agent.engines.simulated.scheduling import namespace_of
from worker_agent.port.types import EngineRequest

BLOCK_SIZE = 4

Held = frozenset[tuple[int, Tier]]
"""What a rank holds: sequence hashes, each with the tier."""


@cache
def rank_named(name: str) -> WorkerRank:
    """Return the rank that `str` made the name of."""
    worker_id, _, dp_rank = name.partition("/")
    return WorkerRank(worker_id, int(dp_rank))


def held_set(blocks: Iterable[HeldBlock]) -> Held:
    """Return what a dump says that a rank holds; a dump names no block twice."""
    rows = [(block.sequence_hash, tier) for block in blocks for tier in block.tiers]
    assert len(set(rows)) == len(rows), "a block stands twice in a dump"
    return frozenset(rows)


def depths(hashes: Sequence[int], held: Held) -> tuple[int, ...]:
    """Return, for each tier, the length of the longest prefix that lies on it and the tiers before it."""
    return tuple(_depth(hashes, {block for block, on in held if on <= tier}) for tier in TIERS)


def _depth(hashes: Sequence[int], held: set[int]) -> int:
    return next((at for at, block in enumerate(hashes) if block not in held), len(hashes))


class Names:
    """Engine hash -> sequence hash of every full block that any request could make an engine store.

    TensorRT-LLM's polled events say nothing of LoRA: an engine block of an adapter is ours of the base model.
    """

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def learn(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        """The request computed, or is to compute, `tokens`."""
        engine_hash = 0
        for at, sequence_hash in enumerate(sequence_hashes(tokens, BLOCK_SIZE, cache_salt=request.cache_salt)):
            block = tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            engine_hash = named_block(block, engine_hash, namespace_of(request))
            assert self._of.setdefault(engine_hash, sequence_hash) == sequence_hash

    def held(self, engine_hashes: Iterable[int], tier: Tier) -> Held:
        """Return what an engine that holds these blocks on `tier` holds."""
        return frozenset((self._of[engine_hash], tier) for engine_hash in engine_hashes)
