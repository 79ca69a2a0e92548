"""What every index must answer in a scenario: what the model says."""

from array import array
from collections.abc import Callable, Mapping
from random import Random

import msgspec

from indexer.index.outline import PassedRequest
from indexer.index.prefix_index import Hashes, PrefixIndex
from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.events import TIERS
from tests.unit.properties.index_model import IndexModel
from tests.unit.properties.index_world import World

FORMS: list[Callable[[list[int]], Hashes]] = [list, tuple, pack_u64, lambda hashes: array("Q", hashes)]
"""How sequence hashes may be handed in."""
Indexes = Mapping[str, PrefixIndex]
MODEL_OUTLINE_MAX = 120
"""The model makes outlines of no more nodes."""


class Comparison:
    """Indexes are asked, and their answers compared with the model's."""

    def __init__(self, random: Random, world: World, model: IndexModel) -> None:
        self._random, self._world, self._model = random, world, model

    def answers(self, indexes: Indexes) -> None:
        """Compare a few overlaps, and all that is counted."""
        queries = [self._world.query(self._random) for _ in range(3)]
        expected = [self._model.overlaps(query) for query in queries]
        statistics = self._model.statistics()
        for name, index in indexes.items():
            for query, depths in zip(queries, expected, strict=True):
                assert index.overlaps(query) == depths, (name, query)
            assert msgspec.structs.replace(index.statistics(), memory_bytes=0) == statistics, name

    def everything(self, indexes: Indexes) -> None:
        """Compare whatever can be asked, for a part of the ranks and blocks; nothing contradicts itself."""
        queries = [*self._world.paths, *(self._world.query(self._random) for _ in range(10))]
        blocks = self._random.sample(sorted(self._world.parent_of), min(20, len(self._world.parent_of)))
        ranks = sorted(self._model.ranks)
        for name, index in indexes.items():
            assert index.self_check() == [], name
            self._compare_matches(name, index, queries)
            for rank in self._random.sample(ranks, min(5, len(ranks))):
                self._compare_rank(name, index, rank)
            for block in [None, *blocks]:
                assert index.children(block) == self._model.children(block), (name, block)
            for block in blocks:
                assert index.holders(block) == self._model.held.get(block, {}), (name, block)
            self._compare_stretches(name, index)
        self._compare_outlines(indexes, blocks)

    def _compare_matches(self, name: str, index: PrefixIndex, queries: list[list[int]]) -> None:
        columns = max(self._model.ranks, default=0) + self._random.choice([1, 2, 9])
        many, one = array("i", [9]) * (4 * columns * len(queries)), array("i", [8]) * (4 * columns)
        index.match_many([self._random.choice(FORMS)(query) for query in queries], many)
        for at, query in enumerate(queries):
            depths, expected = self._model.overlaps(query), array("i", bytes(16 * columns))
            for rank, each in depths.items():
                expected[rank::columns] = array("i", each)
            assert index.match(query, one) == max((each[-1] for each in depths.values()), default=0), (name, query)
            assert one == expected, (name, query)
            assert many[at * len(one) : (at + 1) * len(one)] == one, (name, query)

    def _compare_rank(self, name: str, index: PrefixIndex, rank: int) -> None:
        dumped = [block for columns in index.dump(rank, 50) for block in columns.blocks()]
        assert {block.sequence_hash: block for block in dumped} == self._model.dump(rank), (name, rank)
        place = {block.sequence_hash: at for at, block in enumerate(dumped)}
        assert len(place) == len(dumped), (name, rank)
        for at, block in enumerate(dumped):
            assert block.parent is None or place.get(block.parent, -1) < at, (name, rank)
        for tier in TIERS:
            digest = self._model.digest(rank, tier)
            assert index.digest(rank, tier) == digest.of_tier(tier), (name, rank, tier)
            assert index.bucket_digests(rank, tier) == digest.buckets, (name, rank, tier)

    def _compare_stretches(self, name: str, index: PrefixIndex) -> None:
        found = {
            each.sequence_hash: (each.parent, each.blocks, each.depth_blocks, each.holders, each.children)
            for each in index.prefixes(100_000)
        }
        assert found == self._model.stretches(), name
        first = index.prefixes(5, "holders")
        assert [len(each.holders) for each in first] == sorted((len(each[3]) for each in found.values()), reverse=True)[
            :5
        ]

    def _compare_outlines(self, indexes: Indexes, blocks: list[int]) -> None:
        """Compare the shapes: in small indexes with the model's, which costs a square, else among each other."""
        requests = [PassedRequest(block, float(self._random.randrange(4)), 1.0) for block in blocks]
        expected = self._model.outline(requests) if len(self._model.nodes) <= MODEL_OUTLINE_MAX else None
        for name, index in indexes.items():
            outline = index.outline(requests)
            rows = list(outline.children(None, "subtree", 0, 100_000))
            for row in rows:  # which grows meanwhile
                rows += outline.children(outline.find(row.last), "subtree", 0, 100_000)
            found = {
                row.last: (row.first, row.blocks, row.subtree_blocks, row.depth_blocks, row.children, row.heat)
                for row in rows
            }
            assert len(found) == len(rows) == len(outline), name
            assert outline.skipped_blocks == 0, name
            expected = found if expected is None else expected
            assert found == expected, name
            for first, length, *_ in list(found.values())[:5]:
                assert len(unpack_u64(index.chain(first, 100_000))) == length, (name, first)
