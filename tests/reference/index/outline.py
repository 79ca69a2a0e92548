"""The outline of the reference index."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest

from indexer.index.outline import OutlineNode, OutlineOrder, PassedRequest
from tests.reference.index.state import Forest

_MOST: dict[OutlineOrder, Callable[[OutlineNode], float]] = {
    "subtree": lambda node: node.subtree_blocks,
    "heat": lambda node: node.heat,
    "recent": lambda node: node.stored_s,
    "blocks": lambda node: node.blocks,
}


class ReferenceOutline:
    """An `Outline`, made in one walk. Nodes are in breadth-first order: children behind their parents."""

    skipped_blocks = 0

    def __init__(self, forest: Forest, requests: Iterable[PassedRequest]) -> None:
        self.blocks = len(forest)
        self._parents: list[int | None] = []
        self._children: dict[int | None, list[int]] = {None: []}
        chains = self._walk(forest)
        self._nodes = self._rows(forest, chains, list(requests))
        self._by_last = {node.last: number for number, node in enumerate(self._nodes)}

    def _walk(self, forest: Forest) -> list[list[int]]:
        """Return the chain of each node, and note parents and children."""
        behind: dict[int | None, list[int]] = {}
        for block, node in forest.items():
            behind.setdefault(node.parent, []).append(block)
        chains: list[list[int]] = []
        pending: list[tuple[int, int | None]] = [(block, None) for block in behind.get(None, ())]
        for first, parent in pending:  # which grows meanwhile
            chain, after = [first], behind.get(first, [])
            while len(after) == 1:
                chain.append(after[0])
                after = behind.get(chain[-1], [])
            number = len(chains)
            chains.append(chain)
            self._parents.append(parent)
            self._children[parent].append(number)
            self._children[number] = []
            pending += [(block, number) for block in after]
        return chains

    def _rows(self, forest: Forest, chains: list[list[int]], requests: list[PassedRequest]) -> list[OutlineNode]:
        number_of = {block: number for number, chain in enumerate(chains) for block in chain}
        subtree, heat, used_s = [len(chain) for chain in chains], Counter[int](), Counter[int]()
        depths: list[int] = []
        for request in requests:
            if (number := number_of.get(request.sequence_hash)) is not None:
                heat[number] += request.heat  # type: ignore[assignment]  # a float
                used_s[number] = max(used_s[number], request.used_s)  # type: ignore[assignment]
        for number, parent in enumerate(self._parents):
            depths.append(len(chains[number]) + (0 if parent is None else depths[parent]))
        for number, parent in reversed(list(enumerate(self._parents))):
            if parent is not None:
                subtree[parent] += subtree[number]
                heat[parent] += heat[number]
                used_s[parent] = max(used_s[parent], used_s[number])
        return [
            OutlineNode(
                first=chain[0],
                last=chain[-1],
                blocks=len(chain),
                subtree_blocks=subtree[number],
                depth_blocks=depths[number],
                children=len(self._children[number]),
                heat=float(heat[number]),
                used_s=float(used_s[number]),
                stored_s=max(forest[block].last_stored_s for block in chain),
            )
            for number, chain in enumerate(chains)
        ]

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, last: int) -> int | None:
        """Return the node that ends with this block."""
        return self._by_last.get(last)

    def child_count(self, node: int | None) -> int:
        """Return how many children the node has."""
        return len(self._children[node])

    def children(self, node: int | None, order_by: OutlineOrder, offset: int, limit: int) -> Sequence[OutlineNode]:
        """Return the node's children in descending order, equal ones by ascending `first`, from `offset` on."""
        rows, most = [self._nodes[child] for child in self._children[node]], _MOST[order_by]
        return nsmallest(offset + limit, rows, lambda each: (-most(each), each.first))[offset:]

    def path(self, node: int, limit: int) -> Sequence[OutlineNode]:
        """Return the node and those above it, the node first; at most `limit`."""
        found, at = list[OutlineNode](), node if limit else None
        while at is not None and len(found) < limit:
            found.append(self._nodes[at])
            at = self._parents[at]
        return found


def chain_from(forest: Forest, sequence_hash: int, limit: int) -> list[int]:
    """Return the blocks from this one on up to a fork, at most `limit`; none for an unknown one. Costs a walk."""
    after: dict[int, list[int]] = {}
    for block, node in forest.items():
        if node.parent is not None:
            after.setdefault(node.parent, []).append(block)
    found, at = list[int](), [sequence_hash] if sequence_hash in forest else []
    while len(at) == 1 and len(found) < limit:
        found.append(at[0])
        at = after.get(at[0], [])
    return found
