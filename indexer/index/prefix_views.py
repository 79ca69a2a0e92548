"""Views of single blocks of the index, with names of ranks and media."""

import msgspec

from indexer.index.prefix_index import PrefixIndex
from indexer.index.slots import RankSlots
from kv_protocol.events import TIERS


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that holds a block, and on which media."""

    worker_id: str
    dp_rank: int
    media: tuple[str, ...]


class PrefixView(msgspec.Struct, frozen=True, kw_only=True):
    """A block: its holders, its number of children, and the first of them by hash."""

    sequence_hash: int
    holders: tuple[Holder, ...]
    children_total: int
    children: tuple[int, ...]


def prefix_view(index: PrefixIndex, slots: RankSlots, sequence_hash: int, limit: int) -> PrefixView | None:
    """Return the block with at most `limit` of its children; None if it is unknown."""
    holders, children = index.holders(sequence_hash), index.children(sequence_hash)
    if not holders and not children:
        return None
    return PrefixView(
        sequence_hash=sequence_hash,
        holders=_named(holders, slots),
        children_total=len(children),
        children=tuple(children[:limit]),
    )


def _named(holders: dict[int, int], slots: RankSlots) -> tuple[Holder, ...]:
    ranks = sorted((slots.rank_of(slot), bits) for slot, bits in holders.items())
    return tuple(
        Holder(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            media=tuple(tier.name.lower() for tier in TIERS if bits >> tier & 1),
        )
        for rank, bits in ranks
    )
