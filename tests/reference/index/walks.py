"""Walks over all nodes of the reference index, for views and snapshots."""

from collections.abc import Iterator

from tests.reference.index.nodes import Forest


def children_of(forest: Forest, sequence_hash: int | None) -> list[int]:
    """Return the blocks whose parent is `sequence_hash` (None: those without a known one), ascending."""
    return sorted(block for block, node in forest.items() if node.parent == sequence_hash)


def walk(forest: Forest) -> Iterator[list[int]]:
    """Yield every node once, in chains of equal holders without a fork, each after the one that its parent is in."""
    behind: dict[int | None, list[int]] = {}
    for block, node in forest.items():
        behind.setdefault(node.parent, []).append(block)
    pending = list(behind.get(None, ()))
    while pending:
        first = pending.pop()
        hashes, after = [first], behind.get(first, [])
        while len(after) == 1 and forest[after[0]].holders == forest[first].holders:
            hashes.append(after[0])
            after = behind.get(hashes[-1], [])
        yield hashes
        pending += after
