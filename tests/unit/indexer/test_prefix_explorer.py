"""Pages of the prefix tree: what lies behind a block, which ranks hold it how deep, and what may be asked."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from indexer.follow.fold import IndexFold
from indexer.index.prefix_index import PassedRequest
from indexer.native.index import NativeIndex
from indexer.service import prefix_explorer
from indexer.service.prefix_explorer import Page, PrefixExplorer, TreeQuery
from indexer.service.routes import BadParameter, tree_page, tree_query
from kv_protocol.events import Batch, Event, Removed, Stored, Tier
from kv_protocol.ids import WorkerRank
from tests.contract.indexes import chain
from tests.support.manual_clock import ManualClock
from tests.unit.indexer.life import arrived

A, B, C = WorkerRank("a", 0), WorkerRank("b", 0), WorkerRank("c", 1)
TRUNK, LEFT, RIGHT = chain(6, seed=1), chain(4, seed=2), chain(3, seed=3)


def stored(parent: int | None, blocks: Sequence[int], tier: Tier = Tier.GPU) -> Stored:
    """Return the store of these blocks behind `parent`."""
    return Stored(tuple(blocks), parent, 0 if parent is None else 2, tier)


class Tree:
    """An index of three ranks: all hold the trunk, `a` what is left of its end, `c` what is right of it."""

    def __init__(self, *, heat: Sequence[PassedRequest] | None = None) -> None:
        self.clock = ManualClock(100.0)
        self.fold = IndexFold(NativeIndex())
        self._seqs: dict[WorkerRank, int] = {}

        async def passed() -> Sequence[PassedRequest]:
            return heat or ()

        source: Callable[[], Awaitable[Sequence[PassedRequest]]] | None = None if heat is None else passed
        self.explorer = PrefixExplorer(self.fold, self.clock, heat=source)
        self.tell(A, stored(None, (*TRUNK, *LEFT)))
        self.tell(B, stored(None, tuple(TRUNK[:2])), stored(TRUNK[1], tuple(TRUNK[2:5]), Tier.HOST))
        self.tell(C, stored(None, (*TRUNK, *RIGHT)))

    def tell(self, rank: WorkerRank, *events: Event) -> None:
        """Apply events of a rank, each in a batch."""
        for event in events:
            seq = self._seqs[rank] = self._seqs.get(rank, 0) + 1
            self.fold.apply(arrived(rank, Batch(epoch=7, seq=seq, event=event)), self.clock.now())

    async def page(self, **query: Any) -> Page:
        """Return a page that there is."""
        found = await self.explorer.page(TreeQuery(**query))
        assert found is not None
        return found


async def test_a_page_has_the_nodes_behind_a_block_with_their_holders() -> None:
    tree = Tree()
    roots = await tree.page()
    [trunk] = roots["nodes"]
    assert (trunk["first"], trunk["last"], trunk["blocks"], trunk["subtree_blocks"]) == (
        str(TRUNK[0]),
        str(TRUNK[-1]),
        6,
        13,
    )
    assert (trunk["children"], trunk["holders"], trunk["depth_blocks"]) == (2, 3, 6)
    assert [
        (each["worker_id"], each["dp_rank"], each["blocks"]["gpu"], each["blocks"]["external"])
        for each in trunk["ranks"]
    ] == [
        ("a", 0, 6, 6),
        ("c", 1, 6, 6),
        ("b", 0, 2, 5),
    ]
    behind = await tree.page(behind=TRUNK[-1])
    assert [(each["last"], each["blocks"], each["holders"], each["depth_blocks"]) for each in behind["nodes"]] == [
        (str(LEFT[-1]), 4, 1, 10),
        (str(RIGHT[-1]), 3, 1, 9),
    ]
    assert (behind["total"], behind["path"]) == (2, [{"last": str(TRUNK[-1]), "blocks": 6}])
    assert (behind["outline"]["blocks"], behind["outline"]["nodes"], behind["outline"]["heat_requests"]) == (
        13,
        3,
        None,
    )


async def test_ranks_are_listed_up_to_the_limit_and_counted_beyond() -> None:
    page = await Tree().page(ranks=1)
    assert ([each["worker_id"] for each in page["nodes"][0]["ranks"]], page["nodes"][0]["holders"]) == (["a"], 3)
    assert (await Tree().page(ranks=0))["nodes"][0]["ranks"] == []


async def test_a_block_within_a_node_stands_for_the_node() -> None:
    tree = Tree()
    assert (await tree.page(behind=TRUNK[2]))["nodes"] == (await tree.page(behind=TRUNK[-1]))["nodes"]
    assert await tree.explorer.page(TreeQuery(behind=5)) is None


async def test_heat_is_of_the_requests_and_unknown_without_any_source() -> None:
    warm = Tree(heat=[PassedRequest(LEFT[-1], 0.5, 98.0), PassedRequest(RIGHT[0], 1.0, 99.0)])
    [trunk] = (await warm.page())["nodes"]
    assert (trunk["heat"], trunk["used_ago_s"]) == (1.5, 1.0)
    behind = await warm.page(behind=TRUNK[-1], order_by="heat")
    assert [(each["last"], each["heat"]) for each in behind["nodes"]] == [(str(RIGHT[-1]), 1.0), (str(LEFT[-1]), 0.5)]
    assert (await Tree().page())["nodes"][0]["heat"] is None


async def test_sizes_are_those_of_the_outline_and_holders_those_of_now() -> None:
    tree = Tree()
    before = await tree.page()
    tree.tell(B, Removed(tuple(TRUNK[:2])), stored(None, (77,)))
    [node] = (await tree.page())["nodes"]
    assert (node["holders"], node["subtree_blocks"]) == (2, before["nodes"][0]["subtree_blocks"])
    await tree.clock.advance(prefix_explorer.FRESH_S)
    assert [each["first"] for each in (await tree.page())["nodes"]] == [str(TRUNK[0]), "77"]


async def test_pages_of_many_askers_are_of_one_outline() -> None:
    tree = Tree()
    pages = await asyncio.gather(*(tree.page() for _ in range(8)))
    assert len({page["outline"]["took_s"] for page in pages}) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("behind", "-1"),
        ("behind", "18446744073709551616"),
        ("behind", "x"),
        ("offset", "10001"),
        ("limit", "0"),
        ("limit", "201"),
        ("ranks", "65"),
        ("ranks", ""),
        ("order_by", "size"),
    ],
)
async def test_a_parameter_beyond_its_range_is_named(field: str, value: str) -> None:
    with pytest.raises(BadParameter) as refused:
        tree_query({field: value})
    assert refused.value.field == field
    assert str(refused.value).startswith(f'{field}: found "{value}", allowed ')


async def test_a_block_that_is_unknown_is_said() -> None:
    response = await tree_page(Tree().explorer, {"behind": "5"})
    assert (response.status, json.loads(response.text or "")["error"]["param"]) == (404, "behind")
