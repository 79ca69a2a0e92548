"""Self-check of a reference index: compares all redundant data."""

from collections.abc import Iterator, Mapping

from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS
from tests.reference.index.holder import RankHolding
from tests.reference.index.nodes import Forest
from tests.reference.index.parked import ParkedBlocks
from tests.reference.index.walks import walk


def contradictions(
    forest: Forest, ranks: Mapping[int, RankHolding], parked: ParkedBlocks, holdings: int
) -> Iterator[str]:
    """Yield contradictions as text; `holdings` is the counted number of blocks at ranks."""
    if (found := sum(len(holding.held) for holding in ranks.values())) != holdings:
        yield f"{holdings} holdings counted, {found} there"
    yield from _in_nodes(forest)
    yield from _between_nodes_and_ranks(forest, ranks)
    for rank, holding in ranks.items():
        for tier in TIERS:
            if holding.digests[tier].of_tier(tier) != SetDigest(holding.on(tier)).of_tier(tier):
                yield f"rank {rank}: the digest of tier {tier} is not that of its blocks"
    for block, parent in parked.waiting():
        if parent in forest:
            yield f"block {block.sequence_hash} waits for {parent}, which has a node"
        if block.rank not in ranks:
            yield f"a block of rank {block.rank} waits, and the rank is unknown"


def _in_nodes(forest: Forest) -> Iterator[str]:
    children = dict.fromkeys(forest, 0)
    for sequence_hash, node in forest.items():
        if node.parent is not None and node.parent not in forest:
            yield f"node {sequence_hash}: its parent {node.parent} has no node"
        elif node.parent is not None:
            children[node.parent] += 1
        if node.parent is not None and not node.parent_known:
            yield f"node {sequence_hash}: has a parent that is not known"
    for sequence_hash, node in forest.items():
        if node.child_count != children[sequence_hash]:
            yield f"node {sequence_hash}: counts {node.child_count} children, has {children[sequence_hash]}"
        if not children[sequence_hash] and not any(node.holders):
            yield f"node {sequence_hash}: no rank holds it, and no block follows it"
    if (walked := sum(len(stretch.hashes) for stretch in walk(forest))) != len(forest):
        yield f"{len(forest)} nodes, of which {walked} are reached from a first block: there is a circle"


def _between_nodes_and_ranks(forest: Forest, ranks: Mapping[int, RankHolding]) -> Iterator[str]:
    by_node = {(rank, block): bits for block, node in forest.items() for rank, bits in node.holder_bits().items()}
    by_rank = {(rank, block): bits for rank, holding in ranks.items() for block, bits in holding.held.items()}
    for rank, block in sorted(by_node.keys() | by_rank.keys()):
        found = by_node.get((rank, block), 0), by_rank.get((rank, block), 0)
        if found[0] != found[1]:
            yield f"rank {rank}: holds {block} on tiers {found[0]:04b} by the node, {found[1]:04b} by the rank"
