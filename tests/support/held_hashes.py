"""What a simulated engine's block pool holds."""

from kv_protocol.events import Tier
from worker_agent.engines.simulated.blocks import BlockPool


def held_hashes(pool: BlockPool, tier: Tier = Tier.GPU) -> frozenset[int]:
    """Return the engine hashes of all full blocks of the tree that lie on `tier`, GPU or host."""
    return frozenset(
        block.engine_hash
        for block in pool._tree.values()  # noqa: SLF001
        if len(block.key.tokens) == pool._block_size and block.on_gpu == (tier is Tier.GPU)  # noqa: SLF001
    )
