"""Chooses the cached block to evict.

    lowest priority first; of equal priority the one that was added longest ago

One queue for each priority in use, of which there are at most 101: every operation is O(1) in the number of blocks.
Source: `docs/SOURCES.md` E1.3 (`priority`).
"""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedDict

from worker_agent.port.types import PRIORITY_DEFAULT


class EvictableBlock(Protocol):
    """A block that can be evicted; its priority does not change meanwhile."""

    priority: int


BlockT = TypeVar("BlockT", bound=EvictableBlock)


class EvictionQueue(Generic[BlockT]):
    """The blocks that may be evicted, in the order above."""

    def __init__(self) -> None:
        self._queues: SortedDict[int, OrderedDict[BlockT, None]] = SortedDict({PRIORITY_DEFAULT: OrderedDict()})
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: BlockT) -> None:
        """Put a block behind all others of its priority."""
        queue = self._queues.get(block.priority)
        if queue is None:
            queue = self._queues[block.priority] = OrderedDict()
        queue[block] = None
        self._count += 1

    def remove(self, block: BlockT) -> None:
        """Take a block out: it is used again."""
        del self._queues[block.priority][block]
        self._count -= 1

    def pop(self) -> BlockT:
        """Remove and return the block to evict; there must be one."""
        self._count -= 1
        queue: OrderedDict[BlockT, None] = next(filter(None, self._queues.values()))
        return queue.popitem(last=False)[0]
