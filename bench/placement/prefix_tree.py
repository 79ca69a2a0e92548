"""What was routed to one worker, as a tree of prompt prefixes: the approximate tree of routers without KV events."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixTree:
    """Prefixes by sequence hash; each names its whole prefix, so a set of them is a tree."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain are in the tree."""
        return next((depth for depth, each in enumerate(chain) if each not in self._blocks), len(chain))

    def insert(self, chain: Sequence[int]) -> None:
        """The chain was used just now; a block is always older than its parent."""
        for each in reversed(chain):
            self._blocks[each] = None
            self._blocks.move_to_end(each)

    def evict(self, blocks_max: int) -> None:
        """Drop the leaves used longest ago until at most `blocks_max` blocks are left."""
        while len(self._blocks) > blocks_max:
            self._blocks.popitem(last=False)
