"""The shape of a prefix index at one moment, for people: chains without forks, and what lies behind each.

    node        blocks in a row without a fork, whichever ranks hold them; the root is none
    children    the nodes behind a node's last block; those of the root begin sequences, or have no known parent
    heat        the sum of the requests that went through the node or what is behind it

An outline never changes (`PrefixIndex.outline` makes it).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

OutlineOrder = Literal["subtree", "heat", "recent", "blocks"]
OUTLINE_ORDERS: tuple[OutlineOrder, ...] = get_args(OutlineOrder)
"""By blocks in the subtree, by heat, by the newest store in the chain, by blocks in the chain."""


class PassedRequest(NamedTuple):
    """A request that went through the blocks up to `sequence_hash`: its weight, and when it came (above 0)."""

    sequence_hash: int
    heat: float
    used_s: float


class OutlineNode(NamedTuple):
    """One node. `subtree_blocks` has its own blocks and all behind; `depth_blocks` counts from the root to `last`.

    `used_s` is the newest request's time, 0 without any; `stored_s` is no earlier than the last store in the chain.
    """

    first: int
    last: int
    blocks: int
    subtree_blocks: int
    depth_blocks: int
    children: int
    heat: float
    used_s: float
    stored_s: float


class Outline(Protocol):
    """The nodes of an index; `len` counts them. Nodes are numbers of this outline; None is the root."""

    @property
    def blocks(self) -> int:
        """The blocks in all nodes."""

    @property
    def skipped_blocks(self) -> int:
        """Blocks that moved while the outline was made, and are in none of its nodes."""

    def __len__(self) -> int:
        """Return the number of nodes."""

    def find(self, last: int) -> int | None:
        """Return the node that ends with this block; None if none does."""

    def child_count(self, node: int | None) -> int:
        """Return how many children the node has."""

    def children(self, node: int | None, order_by: OutlineOrder, offset: int, limit: int) -> Sequence[OutlineNode]:
        """Return the node's children in descending order, equal ones by ascending `first`, from `offset` on."""

    def path(self, node: int, limit: int) -> Sequence[OutlineNode]:
        """Return the node and those above it, the node first; at most `limit`."""
