"""The host tier, which takes full blocks that are evicted from the GPU.

    a block is          on the GPU or on the host
    offload             the block moves to the host
    a full host         drops its oldest block for good
    reuse               the block moves back to the GPU
    events              `updated`: another cache level; `removed` when it is dropped

No block outlives its parent: on the GPU a parent is evicted after all its children (see `blocks`); so it comes to the
host after them, and is dropped after them. The blocks of a prefix on the GPU come first, those on the host follow.

Source: `docs/SOURCES.md` E1.1, E1.3, E3.3.
"""

from collections import OrderedDict

from kv_protocol.events import Tier
from worker_agent.engines.simulated.events import StoredBlock, WindowLog, stored_block
from worker_agent.engines.simulated.identity import Block

HOST_PRIORITY_MIN = 35
"""Blocks of a lower priority are not worth the copy. Source: section 1.1, `secondary_offload_min_priority`."""


def stored_on_gpu(block: Block) -> StoredBlock:
    """Return the engine's event data for a block stored on the GPU."""
    return stored_block(block.engine_hash, block.key.tokens, block.key.cache_salt, block.priority)


class HostTier:
    """A tier of `total_blocks`, 1 or more. `moved_blocks` counts copies between GPU and host, since the start."""

    def __init__(self, total_blocks: int, events: WindowLog) -> None:
        self._total_blocks = total_blocks
        self._events = events
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self.moved_blocks = 0

    @property
    def used_blocks(self) -> int:
        """How many blocks are on the host."""
        return len(self._blocks)

    def holds(self, block: Block) -> bool:
        """Return whether a block is on the host."""
        return block in self._blocks

    def offload(self, block: Block) -> list[Block]:
        """Take a block that leaves the GPU; return the blocks that are dropped, which the tree must remove."""
        dropped: list[Block] = []
        if len(self._blocks) == self._total_blocks:
            oldest, _ = self._blocks.popitem(last=False)
            self._events.removed(oldest.engine_hash)
            dropped.append(oldest)
        self._blocks[block] = None
        block.on_gpu = False
        self._moved(block, Tier.GPU, Tier.HOST)
        return dropped

    def onboard(self, block: Block) -> None:
        """Bring a block that is only on the host back to the GPU."""
        del self._blocks[block]
        block.on_gpu = True
        self._moved(block, Tier.HOST, Tier.GPU)

    def _moved(self, block: Block, old: Tier, new: Tier) -> None:
        self.moved_blocks += 1
        self._events.updated(block.engine_hash, "cache_level", old.value, new.value)
