"""Converts between the state of a reference index and a snapshot."""

from collections.abc import Iterable, Mapping

from kv_protocol.events import TIERS
from tests.reference.index.holder import RankHolding
from tests.reference.index.nodes import Forest, Node
from tests.reference.index.parked import ParkedBlocks
from tests.reference.index.snapshot_body import SavedParked, SavedRun, Snapshot
from tests.reference.index.walks import walk


def saved(forest: Forest, ranks: Iterable[int], parked: ParkedBlocks) -> Snapshot:
    """Return the state as a snapshot."""
    return Snapshot(
        sorted(ranks),
        [_saved_run(forest, hashes) for hashes in walk(forest)],
        [SavedParked(block.rank, block.tier, parent, block.sequence_hash) for block, parent in parked.waiting()],
    )


def _saved_run(forest: Forest, hashes: list[int]) -> SavedRun:
    first = forest[hashes[0]]
    holders = tuple(first.holder_bits().items())
    return SavedRun(
        first.parent, first.parent_known, holders, max(forest[block].last_stored_s for block in hashes), hashes
    )


def rebuilt(snapshot: Snapshot) -> tuple[Forest, dict[int, RankHolding]]:
    """Return the nodes and the ranks of a snapshot."""
    forest, ranks = Forest(), {rank: RankHolding() for rank in snapshot.ranks}
    for run in snapshot.runs:
        parent, parent_known = run.parent, run.parent_known
        for sequence_hash in run.hashes:
            node = forest[sequence_hash] = Node(parent, run.last_stored_s, parent_known=parent_known)
            if parent is not None:
                forest[parent].child_count += 1
            _hold(sequence_hash, node, run, ranks)
            parent, parent_known = sequence_hash, True
    return forest, ranks


def _hold(sequence_hash: int, node: Node, run: SavedRun, ranks: Mapping[int, RankHolding]) -> None:
    for rank, bits in run.holders:
        for tier in TIERS:
            if bits >> tier & 1:
                node.holders[tier] |= 1 << rank
                ranks[rank].add(sequence_hash, tier)
