"""The host tier, which takes full blocks that are evicted from the GPU.

                        reported by the engine (`EngineHost`)       reported by another source (`SourceHost`)
    a block is          on the GPU or on the host                   on the GPU, on the host, or both
    offload             the block moves to the host                 it and all blocks before it are copied to the host
    a full host         drops its oldest block for good             drops the block that has been a leaf on the host
                                                                    for longest
    reuse               the block moves back to the GPU             a copy goes to the GPU
    engine events       `updated`: another cache level;             `removed` when it leaves the GPU, `stored` when it
                        `removed` when it is dropped                is back
    source events       -                                           stored and removed, on the host

No block outlives its parent. On the GPU a parent is evicted after all its children (see `blocks`); so it comes to an
engine's host after them, and is dropped after them. A source's host holds complete prefixes, so that its events can be
read without the engine's, which come over another connection, earlier or later. In both cases the blocks of a prefix on
the GPU come first, those only on the host follow, and all are reachable.

Source: `docs/SOURCES.md` E1.1, E1.3, E3.3.
"""

from collections import OrderedDict
from typing import Protocol

from kv_protocol.events import Tier
from worker_agent.engines.simulated.events import StoredBlock, WindowLog, stored_block
from worker_agent.engines.simulated.identity import Block
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

HOST_PRIORITY_MIN = 35
"""Blocks of a lower priority are not worth the copy. Source: section 1.1, `secondary_offload_min_priority`."""


def stored_on_gpu(block: Block) -> StoredBlock:
    """Return the engine's event data for a block stored on the GPU."""
    return stored_block(block.engine_hash, block.key.tokens, block.key.cache_salt, block.priority)


class HostTier(Protocol):
    """The blocks on the host. `moved_blocks` counts copies between GPU and host, since the start."""

    moved_blocks: int

    @property
    def used_blocks(self) -> int:
        """How many blocks are on the host."""

    def holds(self, block: Block) -> bool:
        """Return whether a block is on the host."""

    def offload(self, block: Block) -> list[Block]:
        """Take a block that leaves the GPU; return the blocks that are dropped, which the tree must remove."""

    def onboard(self, block: Block) -> None:
        """Bring a block that is only on the host back to the GPU."""


class EngineHost:
    """The engine's own tier of `total_blocks`, 1 or more, reported in the engine's stream."""

    def __init__(self, total_blocks: int, events: WindowLog) -> None:
        self._total_blocks = total_blocks
        self._events = events
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self.moved_blocks = 0

    @property
    def used_blocks(self) -> int:
        """See `HostTier`."""
        return len(self._blocks)

    def holds(self, block: Block) -> bool:
        """See `HostTier`."""
        return block in self._blocks

    def offload(self, block: Block) -> list[Block]:
        """See `HostTier`."""
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
        """See `HostTier`."""
        del self._blocks[block]
        block.on_gpu = True
        self._moved(block, Tier.HOST, Tier.GPU)

    def _moved(self, block: Block, old: Tier, new: Tier) -> None:
        self.moved_blocks += 1
        self._events.updated(block.engine_hash, "cache_level", old.value, new.value)


class SourceHost:
    """A tier of `total_blocks`, 1 or more, beside the engine; `take` returns its own source's events."""

    def __init__(self, total_blocks: int, block_size: int, events: WindowLog) -> None:
        self._total_blocks = total_blocks
        self._block_size = block_size
        self._events = events
        self._children: dict[Block, int] = {}
        self._leaves: OrderedDict[Block, None] = OrderedDict()
        self._pending_events: list[EngineEvent] = []
        self.moved_blocks = 0

    @property
    def used_blocks(self) -> int:
        """See `HostTier`."""
        return len(self._children)

    def holds(self, block: Block) -> bool:
        """See `HostTier`."""
        return block in self._children

    def offload(self, block: Block) -> list[Block]:
        """See `HostTier`. If a prefix does not fit, its beginning is copied as far as it fits."""
        self._events.removed(block.engine_hash)
        block.on_gpu = False
        missing: list[Block] = []
        each: Block | None = block
        while each is not None and each not in self._children:
            missing.append(each)
            each = each.key.parent
        dropped: list[Block] = []
        while missing and self._copy(missing[-1], dropped):
            missing.pop()
        return [*dropped, block] if missing else dropped

    def onboard(self, block: Block) -> None:
        """See `HostTier`."""
        self.moved_blocks += 1
        block.on_gpu = True
        self._events.stored(block.parent_hash, [stored_on_gpu(block)])

    def take(self) -> list[EngineEvent]:
        """Return the host tier's events since the last call."""
        events, self._pending_events = self._pending_events, []
        return events

    def account(self) -> list[EngineEvent]:
        """Return events that describe all blocks on the host, parents first, whatever was reported before."""
        return [EngineCleared(), *map(self._stored, self._children)]

    def _copy(self, block: Block, dropped: list[Block]) -> bool:
        """Copy a block whose parent is on the host; return False if only blocks of its own prefix could be dropped."""
        parent = block.key.parent
        if parent is not None:
            self._children[parent] += 1
            self._leaves.pop(parent, None)
        if len(self._children) == self._total_blocks and not self._drop(dropped):
            self._leave(parent)
            return False
        self._children[block] = 0
        self._leaves[block] = None
        self.moved_blocks += 1
        self._pending_events.append(self._stored(block))
        return True

    def _drop(self, dropped: list[Block]) -> bool:
        if not self._leaves:
            return False
        block, _ = self._leaves.popitem(last=False)
        del self._children[block]
        self._leave(block.key.parent)
        self._pending_events.append(EngineRemoved(block_hashes=(block.engine_hash,), tier=Tier.HOST))
        if not block.on_gpu:
            dropped.append(block)
        return True

    def _leave(self, parent: Block | None) -> None:
        """Count one block less after `parent`."""
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._leaves[parent] = None

    def _stored(self, block: Block) -> EngineStored:
        return EngineStored(
            block_hashes=(block.engine_hash,),
            parent_block_hash=block.parent_hash,
            token_ids=block.key.tokens,
            block_size=self._block_size,
            tier=Tier.HOST,
            lora_name=block.key.lora_name,
            cache_salt=block.key.cache_salt,
        )
