"""Whatever is stored, removed, cleared, dropped and loaded: the index agrees with a model that knows only the rules."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import HeldBlock
from kv_protocol.splitmix import splitmix64
from tests.contract.indexes import IMPLEMENTATIONS, MakeIndex, dumped, is_parents_first, load
from tests.support.amount import examples
from tests.unit.properties.index_model import IndexModel
from tests.unit.properties.planted_indexes import PLANTED

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


ranks = st.sampled_from(RANKS)
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.HOST, Tier.EXTERNAL])
blocks = st.sampled_from(BLOCKS)
some_blocks = st.lists(blocks, min_size=1, max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """Ranks that store and lose parts of one forest."""

    make_index: MakeIndex
    index: PrefixIndex

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.model = IndexModel(PARENT, PARKED_MAX, TTL_S)
        self.index = type(self).make_index(parked_blocks_max=PARKED_MAX, parked_ttl_s=TTL_S)
        for rank in RANKS:
            self.index.register(rank)
            self.model.ranks.add(rank)

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
        held = sorted(block for block, holders in self.model.held.items() if holders.get(rank, 0) >> tier & 1)
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
        self.model.drop(rank)
        if comes_back:
            self.agrees()
        self.index.register(rank)
        self.model.ranks.add(rank)

    @rule(rank=ranks, rows=st.dictionaries(blocks, st.integers(1, 15), max_size=6))
    def load(self, rank: int, rows: dict[int, int]) -> None:
        dump = [HeldBlock(block, PARENT[block], rows[block]) for block in sorted(rows, key=lambda at: len(path_to(at)))]
        load(self.index, rank, dump, self.now_s)
        self.model.load(rank, dump)

    @rule(source=ranks, reader=ranks)
    def load_the_dump_of_a_rank(self, source: int, reader: int) -> None:
        dump = dumped(self.index, source)
        load(self.index, reader, dump, self.now_s)
        self.model.load(reader, dump)

    @rule(waited_s=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S]))
    def expire(self, waited_s: float) -> None:
        self.now_s += waited_s
        assert self.index.expire(self.now_s) == self.model.expire(self.now_s)

    @invariant()
    def agrees(self) -> None:
        for path in PATHS:
            assert self.index.overlaps(path) == self.model.overlaps(path)
        for rank in sorted(self.model.ranks):
            dump = dumped(self.index, rank)
            assert {row.sequence_hash: row for row in dump} == self.model.dump(rank)
            assert len({row.sequence_hash for row in dump}) == len(dump)
            assert is_parents_first(dump)
            for tier in TIERS:
                assert self.index.digest(rank, tier) == self.model.digest(rank, tier).of_tier(tier)
        assert msgspec.structs.replace(self.index.statistics(), memory_bytes=0) == self.model.statistics()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for rank in sorted(self.model.ranks):
                self.index.drop(rank)
            now = self.index.statistics()
            assert (now.ranks, now.nodes, now.held_blocks, now.parked_blocks) == (0, 0, 0, 0)


def machine_of(make_index: MakeIndex) -> type[IndexMachine]:
    return type("Machine", (IndexMachine,), {"make_index": staticmethod(make_index)})


@pytest.mark.parametrize("make_index", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_the_index_agrees_with_the_model(make_index: MakeIndex) -> None:
    search = settings(
        max_examples=examples(100),
        stateful_step_count=40,
        deadline=None,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine_of(make_index), settings=search)


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.planted
def test_the_property_fails_on_a_planted_bug(planted: MakeIndex) -> None:
    search = settings(
        max_examples=examples(200),
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_of(planted), settings=search)
