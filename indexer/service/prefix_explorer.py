"""The prefix tree of all ranks for people: pages of nodes, with how much lies behind each and which ranks hold it.

An outline (`index/prefix_index.py`) gives sizes and order. It is made on a thread, made again once it is older than
`FRESH_S`, and dropped `IDLE_S` after its last use. Holders are as of the question, not as of the outline. The event
loop goes on meanwhile: other threads run between two slices of the outline, and between two nodes of a page. On a page
hashes are decimal text, since JavaScript's numbers do not have 64 bits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from indexer.follow.fold import IndexFold
from indexer.index.prefix_index import RANKS_MAX, Outline, OutlineNode, OutlineOrder, PassedRequest
from kv_protocol.codec import unpack_u64
from kv_protocol.events import TIERS
from kv_runtime.clock import Clock

FRESH_S = 2.0
IDLE_S = 60.0
CHAIN_BLOCKS_MAX = 4096
"""How many of a node's first blocks are compared with what ranks hold."""
CHAIN_END_BLOCKS_MAX = 1 << 16
"""How many blocks behind a block are searched for the end of its node."""
PATH_MAX = 64

HeatSource = Callable[[], Awaitable[Sequence[PassedRequest]]]
"""Returns recent requests, each with its weight."""
UsesSource = Callable[[Sequence[OutlineNode]], Sequence["NodeUse"]]
"""Returns how recent requests used each of the nodes."""
Page = dict[str, Any]
"""An object of JSON."""
_Depths = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class TreeQuery(NamedTuple):
    """A question for the children of the node that has the block `behind`; None: for the roots."""

    behind: int | None = None
    order_by: OutlineOrder = "subtree"
    offset: int = 0
    limit: int = 50
    ranks: int = 8
    """How many holders are listed for each node, at most."""


class NodeUse(msgspec.Struct):
    """The models and tenants of recent requests through a node, and the beginning of its text, None if not kept."""

    models: list[str]
    tenants: list[str]
    text: str | None = None


class _Made(NamedTuple):
    outline: Outline
    at_s: float
    took_s: float
    requests: int | None


class PrefixExplorer:
    """Pages of one index's tree. Without `heat` and `uses`, nodes have neither."""

    def __init__(
        self,
        fold: IndexFold,
        clock: Clock,
        *,
        heat: HeatSource | None = None,
        uses: UsesSource | None = None,
    ) -> None:
        self._fold, self._clock, self._heat, self._uses = fold, clock, heat, uses
        self._made: _Made | None = None
        self._making = asyncio.Lock()
        self._drop: asyncio.TimerHandle | None = None

    async def page(self, query: TreeQuery) -> Page | None:
        """Return the page; None if the index has no block `behind`, or that block is newer than the outline."""
        made = await self._current()
        found = await asyncio.to_thread(_found, self._fold, made.outline, query)
        if found is None:
            return None
        path, total, rows = found
        now_s, outline = self._clock.now(), made.outline
        uses = [None] * len(rows) if self._uses is None else self._uses([node for node, _ in rows])
        return {
            "outline": {
                "age_s": round(now_s - made.at_s, 3),
                "took_s": round(made.took_s, 6),
                "blocks": outline.blocks,
                "nodes": len(outline),
                "skipped_blocks": outline.skipped_blocks,
                "heat_requests": made.requests,
            },
            "behind": None if query.behind is None else str(query.behind),
            "path": [{"last": str(node.last), "blocks": node.blocks} for node in reversed(path)],
            "total": total,
            "offset": query.offset,
            "nodes": [
                {
                    "first": str(node.first),
                    "last": str(node.last),
                    "blocks": node.blocks,
                    "subtree_blocks": node.subtree_blocks,
                    "depth_blocks": node.depth_blocks,
                    "children": node.children,
                    "heat": None if made.requests is None else round(node.heat, 4),
                    "used_ago_s": round(max(0.0, now_s - node.used_s), 3) if node.used_s else None,
                    "stored_ago_s": round(max(0.0, now_s - node.stored_s), 3),
                    **holders,
                    "use": use,
                }
                for (node, holders), use in zip(rows, uses, strict=True)
            ],
        }

    async def _current(self) -> _Made:
        async with self._making:
            if self._made is None or self._clock.now() - self._made.at_s >= FRESH_S:
                self._made = await self._make()
            if self._drop is not None:
                self._drop.cancel()
            self._drop = asyncio.get_running_loop().call_later(IDLE_S, self._forget)
            return self._made

    def _forget(self) -> None:
        self._made = None

    async def _make(self) -> _Made:
        requests = None if self._heat is None else await self._heat()
        at_s, began_s = self._clock.now(), perf_counter()
        outline = await asyncio.to_thread(self._fold.outline, requests or ())
        return _Made(outline, at_s, perf_counter() - began_s, None if requests is None else len(requests))


def _found(
    fold: IndexFold, outline: Outline, query: TreeQuery
) -> tuple[Sequence[OutlineNode], int, list[tuple[OutlineNode, Page]]] | None:
    """Return the nodes up to the root, the number of children, and the page's children with their holders."""
    node = None
    if query.behind is not None:
        node = outline.find(query.behind)
        if node is None:
            behind = unpack_u64(fold.chain(query.behind, CHAIN_END_BLOCKS_MAX))
            node = outline.find(behind[-1]) if behind else None
        if node is None:
            return None
    rows = outline.children(node, query.order_by, query.offset, query.limit)
    out = np.zeros((len(TIERS), RANKS_MAX), dtype=np.int32)
    path = [] if node is None else outline.path(node, PATH_MAX)
    return path, outline.child_count(node), [(row, _holders(fold, row, out, query.ranks)) for row in rows]


def _holders(fold: IndexFold, node: OutlineNode, out: _Depths, ranks: int) -> Page:
    """Return how many ranks hold the node's first block, and which of them hold most of the node.

    For each of these, `blocks` counts the node's leading blocks that it holds on each medium or a faster one.
    """
    fold.match(fold.chain(node.first, min(node.blocks, CHAIN_BLOCKS_MAX)), out.data)
    slots = out[-1].nonzero()[0]
    keys = out[-1, slots].astype(np.int64) * (CHAIN_BLOCKS_MAX + 1) + out[0, slots]
    first = slots[np.argsort(-keys, kind="stable")[:ranks]].tolist()
    named = [(rank, out[:, slot].tolist()) for slot in first if (rank := fold.rank_at(slot)) is not None]
    media = [tier.name.lower() for tier in TIERS]
    shown = [{**rank._asdict(), "blocks": dict(zip(media, depths, strict=True))} for rank, depths in named]
    return {"holders": len(slots), "ranks": shown}
