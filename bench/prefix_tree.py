"""A cache of prompt blocks, as a tree of prefixes: an engine's, or what was routed to a worker."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class PrefixTree:
    """Prefixes by sequence hash; each names its whole prefix, so a set of them is a tree."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain are in the tree; a block's parent is."""
        return bisect_left(chain, True, key=lambda each: each not in self._blocks)  # noqa: FBT003 - what is looked for

    def insert(self, chain: Sequence[int]) -> None:
        """The chain was used just now; a block is always older than its parent."""
        for each in reversed(chain):
            self._blocks[each] = None
            self._blocks.move_to_end(each)

    def evict(self, blocks_max: int) -> list[int]:
        """Drop the leaves used longest ago until at most `blocks_max` blocks are left; return them in that order."""
        return [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - blocks_max)]
