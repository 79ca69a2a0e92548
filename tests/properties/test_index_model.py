"""Whatever is stored, removed, cleared, dropped and loaded: the index agrees with a model that knows only the rules.

The model is sets, and a fixed forest of paths. A block has a node while somebody holds it, or while a node names it as
its parent; a node names its parent once the block was held. A block is parked while its parent has no node.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from indexer.core.parked import ParkedBlock
from indexer.core.tree import Depths, IndexStatistics, PrefixIndex
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import HeldBlock
from kv_protocol.splitmix import splitmix64

RANKS = (0, 1, 64)
PARKED_MAX = 3
TTL_S = 5.0


def grow(parent: int | None, depth: int, at: int) -> Iterator[tuple[int, int | None]]:
    """Yield the blocks of a small forest: one fork at every second level."""
    for twig in range(2 if depth % 2 else 1):
        block = splitmix64(at * 2 + twig)
        yield block, parent
        if depth < 5:
            yield from grow(block, depth + 1, at * 2 + twig)


PARENT: dict[int, int | None] = dict(grow(None, 1, 1))
BLOCKS = sorted(PARENT)


def path_to(block: int | None) -> list[int]:
    """Return the blocks from the root to `block`."""
    path = []
    while block is not None:
        path.append(block)
        block = PARENT[block]
    return path[::-1]


PATHS = [path_to(block) for block in BLOCKS if block not in PARENT.values()]

Held = tuple[int, int, Tier]
"""Rank, block, tier."""


class Waiting(NamedTuple):
    parent: int
    since_s: float


class Model:
    """What the rules say."""

    def __init__(self) -> None:
        self.ranks = set(RANKS)
        self.held: set[Held] = set()
        self.linked: set[int] = set()
        self.parked: dict[Held, Waiting] = {}  # oldest first
        self.lost: set[tuple[int, Tier]] = set()
        self.duplicates = self.unknown_removals = self.parked_total = self.lost_total = 0

    def nodes(self) -> set[int]:
        nodes = {block for _, block, _ in self.held}
        new = nodes
        while new:
            parents = {PARENT[block] for block in new & self.linked}
            new = {parent for parent in parents if parent is not None} - nodes
            nodes = nodes | new
        return nodes

    def hold(self, block: Held) -> None:
        self.duplicates += block in self.held
        self.held.add(block)
        self.linked.add(block[1])

    def settle(self) -> None:
        """Forget the links of what has no node; hold what is parked and whose parent has one."""
        self.linked &= self.nodes()
        while ready := [block for block, waiting in self.parked.items() if waiting.parent in self.nodes()]:
            for block in ready:
                del self.parked[block]
                self.hold(block)

    def store(self, rank: int, blocks: Iterable[int], tier: Tier, now_s: float) -> None:
        for block in blocks:
            parent = PARENT[block]
            if parent is None or parent in self.nodes():
                self.hold((rank, block, tier))
            else:
                self.parked.pop((rank, block, tier), None)
                self.parked[rank, block, tier] = Waiting(parent, now_s)
                self.parked_total += 1
                if len(self.parked) > PARKED_MAX:
                    self.lose(next(iter(self.parked)))
            self.settle()

    def lose(self, block: Held) -> None:
        del self.parked[block]
        self.lost.add((block[0], block[2]))
        self.lost_total += 1

    def remove(self, rank: int, blocks: Iterable[int], tier: Tier) -> None:
        for block in blocks:
            if (rank, block, tier) in self.held:
                self.held.remove((rank, block, tier))
            elif self.parked.pop((rank, block, tier), None) is None:
                self.unknown_removals += 1
        self.settle()

    def clear(self, rank: int, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            self.held = {block for block in self.held if (block[0], block[2]) != (rank, tier)}
            self.parked = {block: waits for block, waits in self.parked.items() if (block[0], block[2]) != (rank, tier)}
            self.lost.discard((rank, tier))
        self.settle()

    def load(self, rank: int, rows: Iterable[HeldBlock]) -> None:
        self.clear(rank, TIERS)
        for row in rows:
            for tier in row.tiers:
                self.hold((rank, row.sequence_hash, tier))
        self.settle()

    def expire(self, now_s: float) -> set[int]:
        for block in [block for block, waiting in self.parked.items() if now_s - waiting.since_s >= TTL_S]:
            self.lose(block)
        losers, self.lost = {rank for rank, _ in self.lost}, set()
        return losers

    def dump(self, rank: int) -> dict[int, HeldBlock]:
        bits: dict[int, int] = {}
        for holder, block, tier in self.held:
            if holder == rank:
                bits[block] = bits.get(block, 0) | 1 << tier
        return {block: HeldBlock(block, PARENT[block], bits[block]) for block in bits}

    def match(self, query: Sequence[int]) -> dict[int, Depths]:
        depths = {rank: [self.depth(rank, query, tier) for tier in TIERS] for rank in self.ranks}
        return {rank: (each[0], each[1], each[2], each[3]) for rank, each in depths.items() if each[-1]}

    def depth(self, rank: int, query: Sequence[int], tier: Tier) -> int:
        for depth, block in enumerate(query):
            if not any((rank, block, each) in self.held for each in TIERS[: tier + 1]):
                return depth
        return len(query)

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        return SetDigest(block for holder, block, on in self.held if (holder, on) == (rank, tier)).of_tier(tier)

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(
            ranks=len(self.ranks),
            nodes=len(self.nodes()),
            held_blocks=len({(rank, block) for rank, block, _ in self.held}),
            parked_blocks=len(self.parked),
            duplicate_blocks_total=self.duplicates,
            unknown_removals_total=self.unknown_removals,
            parked_blocks_total=self.parked_total,
            parked_lost_blocks_total=self.lost_total,
            parent_conflicts_total=0,
        )


ranks = st.sampled_from(RANKS)
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.HOST, Tier.EXTERNAL])
blocks = st.sampled_from(BLOCKS)
some_blocks = st.lists(blocks, min_size=1, max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """Ranks that store and lose parts of one forest."""

    index_class = PrefixIndex

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.model = Model()
        self.index = self.index_class(parked_blocks_max=PARKED_MAX, parked_ttl_s=TTL_S)
        for rank in RANKS:
            self.index.register(rank)

    @rule(rank=ranks, end=blocks, length=st.integers(1, 5), tier=tiers)
    def store(self, rank: int, end: int, length: int, tier: Tier) -> None:
        segment = path_to(end)[-length:]
        self.index.store(rank, PARENT[segment[0]], segment, tier, self.now_s)
        self.model.store(rank, segment, tier, self.now_s)

    @rule(rank=ranks, end=blocks, tier=tiers)
    def store_without_the_root(self, rank: int, end: int, tier: Tier) -> None:
        self.store(rank, end, max(1, len(path_to(end)) - 1), tier)

    @rule(rank=ranks, path=st.sampled_from(PATHS), tier=tiers)
    def store_a_whole_path(self, rank: int, path: list[int], tier: Tier) -> None:
        self.index.store(rank, None, path, tier, self.now_s)
        self.model.store(rank, path, tier, self.now_s)

    @rule(rank=ranks, gone=some_blocks, tier=tiers)
    def remove(self, rank: int, gone: list[int], tier: Tier) -> None:
        self.index.remove(rank, gone, tier)
        self.model.remove(rank, gone, tier)

    @rule(rank=ranks, tier=tiers, data=st.data())
    def remove_and_refill_a_held_block(self, rank: int, tier: Tier, data: st.DataObject) -> None:
        held = sorted(block for holder, block, on in self.model.held if (holder, on) == (rank, tier))
        if held:
            gone = data.draw(st.sampled_from(held))
            self.remove(rank, [gone], tier)
            self.agrees()
            self.store(rank, gone, 1, tier)

    @rule(rank=ranks, tier=st.one_of(st.none(), tiers))
    def clear(self, rank: int, tier: Tier | None) -> None:
        self.index.clear(rank, tier)
        self.model.clear(rank, TIERS if tier is None else (tier,))

    @rule(rank=ranks, comes_back=st.booleans())
    def drop(self, rank: int, comes_back: bool) -> None:
        self.index.drop(rank)
        self.model.clear(rank, TIERS)
        self.model.ranks.discard(rank)
        if comes_back:
            self.agrees()
        self.index.register(rank)
        self.model.ranks.add(rank)

    @rule(rank=ranks, rows=st.dictionaries(blocks, st.integers(1, 15), max_size=6))
    def load(self, rank: int, rows: dict[int, int]) -> None:
        dump = [HeldBlock(block, PARENT[block], rows[block]) for block in sorted(rows, key=lambda at: len(path_to(at)))]
        self.index.load(rank, iter(dump))
        self.model.load(rank, dump)

    @rule(source=ranks, reader=ranks)
    def load_the_dump_of_a_rank(self, source: int, reader: int) -> None:
        dump = list(self.index.dump(source))
        self.index.load(reader, dump)
        self.model.load(reader, dump)

    @rule(waited_s=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S]))
    def expire(self, waited_s: float) -> None:
        self.now_s += waited_s
        assert self.index.expire(self.now_s) == self.model.expire(self.now_s)

    @invariant()
    def agrees(self) -> None:
        for path in PATHS:
            assert self.index.match(path) == self.model.match(path)
        for rank in sorted(self.model.ranks):
            dump = list(self.index.dump(rank))
            assert {row.sequence_hash: row for row in dump} == self.model.dump(rank)
            place = {row.sequence_hash: at for at, row in enumerate(dump)}
            assert len(place) == len(dump)
            assert all(place.get(row.parent, -1) < at for at, row in enumerate(dump) if row.parent is not None)
            for tier in TIERS:
                assert self.index.digest(rank, tier) == self.model.digest(rank, tier)
        assert self.index.statistics() == self.model.statistics()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for rank in sorted(self.model.ranks):
                self.index.drop(rank)
            now = self.index.statistics()
            assert (now.ranks, now.nodes, now.held_blocks, now.parked_blocks) == (0, 0, 0, 0)


def machine_of(index_class: type[PrefixIndex]) -> type[IndexMachine]:
    return type("Machine", (IndexMachine,), {"index_class": index_class})


@pytest.mark.parametrize("index_class", [PrefixIndex])
def test_the_index_agrees_with_the_model(index_class: type[PrefixIndex]) -> None:
    search = settings(
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine_of(index_class), settings=search)


class TruncatesAtRemovals(PrefixIndex):
    """Planted bug: who loses a block loses what lies beyond it."""

    def remove(self, rank: int, sequence_hashes: Iterable[int], tier: Tier) -> None:
        for sequence_hash in sequence_hashes:
            super().remove(rank, [sequence_hash], tier)
            beyond = [block.sequence_hash for block in self.dump(rank) if block.parent == sequence_hash]
            if beyond:
                self.remove(rank, beyond, tier)


class RootsOrphans(PrefixIndex):
    """Planted bug: what should be parked becomes a root."""

    def store(self, rank: int, parent: int | None, sequence_hashes: Sequence[int], tier: Tier, now_s: float) -> None:
        super().store(rank, parent if parent in self._nodes else None, sequence_hashes, tier, now_s)


class HoldsOrphans(PrefixIndex):
    """Planted bug: an overcount, for a store is believed like a dump."""

    def store(self, rank: int, parent: int | None, sequence_hashes: Sequence[int], tier: Tier, now_s: float) -> None:
        del now_s
        for sequence_hash in sequence_hashes:
            self._attach(rank, parent, sequence_hash, tier)
            parent = sequence_hash


class DropsOrphans(PrefixIndex):
    """Planted bug: an undercount, for what should be parked is forgotten."""

    def store(self, rank: int, parent: int | None, sequence_hashes: Sequence[int], tier: Tier, now_s: float) -> None:
        if parent is None or parent in self._nodes:
            super().store(rank, parent, sequence_hashes, tier, now_s)


class ParksWholeEvents(PrefixIndex):
    """Planted bug: a block whose parent is known waits because the head of its event does."""

    def store(self, rank: int, parent: int | None, sequence_hashes: Sequence[int], tier: Tier, now_s: float) -> None:
        if parent is None or parent in self._nodes:
            super().store(rank, parent, sequence_hashes, tier, now_s)
            return
        for sequence_hash in sequence_hashes:
            self._parked.park(ParkedBlock(rank, sequence_hash, tier), parent, now_s)
            parent = sequence_hash


class WaitsForUnheldParentsInVain(PrefixIndex):
    """Planted bug: a parked block stays parked when its parent comes as the unheld parent of a dump."""

    def _attach(self, rank: int, parent: int | None, sequence_hash: int, tier: Tier) -> None:
        self._hold(rank, sequence_hash, self._node(sequence_hash, parent), tier)
        for block in self._parked.take(sequence_hash):
            self._attach(block.rank, sequence_hash, block.sequence_hash, block.tier)


class IgnoresTiersOfRemovals(PrefixIndex):
    """Planted bug: a removal from one tier is one from all."""

    def remove(self, rank: int, sequence_hashes: Iterable[int], tier: Tier) -> None:
        for sequence_hash in sequence_hashes:
            super().remove(rank, [sequence_hash], tier)
            for other in TIERS:
                self._release(rank, sequence_hash, other)


class MatchesEachTierAlone(PrefixIndex):
    """Planted bug: depth t counts blocks on tier t only."""

    def match(self, sequence_hashes: Sequence[int]) -> dict[int, Depths]:
        found: dict[int, list[int]] = {}
        for tier in TIERS:
            alive = set(self._ranks)
            for sequence_hash in sequence_hashes:
                alive = {rank for rank in alive if self._ranks[rank].held.get(sequence_hash, 0) >> tier & 1}
                for rank in alive:
                    found.setdefault(rank, [0, 0, 0, 0])[tier] += 1
        return {rank: (each[0], each[1], each[2], each[3]) for rank, each in found.items()}


class MatchesAcrossHoles(PrefixIndex):
    """Planted bug: an overcount, for blocks beyond a hole are counted."""

    def match(self, sequence_hashes: Sequence[int]) -> dict[int, Depths]:
        found = super().match(sequence_hashes)
        held = {rank: sum(block in self._ranks[rank].held for block in sequence_hashes) for rank in found}
        return {rank: (*each[:3], held[rank]) for rank, each in found.items()}


class SeesSixtyFourRanks(PrefixIndex):
    """Planted bug: the set of holders is one machine word."""

    def _hold(self, rank: int, *args: object) -> None:
        super()._hold(rank, *args)  # type: ignore[arg-type]
        for node in self._nodes.values():
            node.holders = [bits & 2**64 - 1 for bits in node.holders]


class KeepsDigestsOfTheRemoved(PrefixIndex):
    """Planted bug: a removal does not change the digest."""

    def _release(self, rank: int, sequence_hash: int, tier: Tier) -> bool:
        released = super()._release(rank, sequence_hash, tier)
        if released:
            self._ranks[rank].digests[tier].add(sequence_hash)
        return released


class CountsDuplicatesIntoDigests(PrefixIndex):
    """Planted bug: a block that is stored twice is twice in the digest."""

    def _hold(self, rank: int, sequence_hash: int, *args: object) -> None:
        before = self._duplicates
        super()._hold(rank, sequence_hash, *args)  # type: ignore[arg-type]
        if self._duplicates > before:
            self._ranks[rank].digests[Tier.GPU].add(sequence_hash)


class LosesRefills(PrefixIndex):
    """Planted bug: the refill of a hole is taken for a duplicate."""

    def _attach(self, rank: int, parent: int | None, sequence_hash: int, tier: Tier) -> None:
        node = self._nodes.get(sequence_hash)
        if node is None or any(node.holders) or not node.parent_known:
            super()._attach(rank, parent, sequence_hash, tier)


class DropLeavesHolders(PrefixIndex):
    """Planted bug: the blocks of a rank outlive it."""

    def drop(self, rank: int) -> None:
        self._ranks.pop(rank, None)


class LoadMerges(PrefixIndex):
    """Planted bug: a dump is added to what was held."""

    def load(self, rank: int, blocks: Iterable[HeldBlock]) -> None:
        for block in blocks:
            for tier in block.tiers:
                self._attach(rank, block.parent, block.sequence_hash, tier)


class ClearKeepsParked(PrefixIndex):
    """Planted bug: what was parked before a clear is held after it."""

    def clear(self, rank: int, tier: Tier | None = None) -> None:
        for on_tier in TIERS if tier is None else (tier,):
            for block in [block for block, bits in self._ranks[rank].held.items() if bits >> on_tier & 1]:
                self._release(rank, block, on_tier)


class LeaksParents(PrefixIndex):
    """Planted bug: a parent which nobody holds outlives its last child."""

    def _prune(self, sequence_hash: int) -> None:
        parent = self._nodes[sequence_hash].parent
        if parent is not None:
            self._nodes[parent].child_count += 1
        super()._prune(sequence_hash)
        if parent is not None and sequence_hash in self._nodes:
            self._nodes[parent].child_count -= 1


class BlamesTheCleared(PrefixIndex):
    """Planted bug: a rank is named for what it lost before it began anew."""

    def clear(self, rank: int, tier: Tier | None = None) -> None:
        lost = set(self._parked._losers)
        super().clear(rank, tier)
        self._parked._losers |= lost


PLANTED: list[type[PrefixIndex]] = [
    TruncatesAtRemovals,
    RootsOrphans,
    HoldsOrphans,
    DropsOrphans,
    ParksWholeEvents,
    WaitsForUnheldParentsInVain,
    IgnoresTiersOfRemovals,
    MatchesEachTierAlone,
    MatchesAcrossHoles,
    SeesSixtyFourRanks,
    KeepsDigestsOfTheRemoved,
    CountsDuplicatesIntoDigests,
    LosesRefills,
    DropLeavesHolders,
    LoadMerges,
    ClearKeepsParked,
    LeaksParents,
    BlamesTheCleared,
]


@pytest.mark.parametrize("planted", PLANTED)
def test_the_property_fails_on_a_planted_bug(planted: type[PrefixIndex]) -> None:
    search = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_of(planted), settings=search)
