"""The blocks of ranks as lines of JSON: to store, to compare with other tools, or to load again.

json       for each rank a line of its place and figures, then one for each block, parents first
columns    for each rank one line: `indexer/follow/rank_state.py`, in JSON, with its columns in base64
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from indexer.follow.rank_state import RankState

Shape = Literal["json", "columns"]
SHAPES: tuple[Shape, ...] = ("json", "columns")

_encode = msgspec.json.Encoder().encode


def state_lines(state: RankState, shape: Shape) -> Iterator[bytes]:
    """Yield the lines of a rank, each with its end."""
    if shape == "columns":
        yield _encode(state) + b"\n"
        return
    rank = state.rank._asdict()
    position = {"epoch": state.epoch, "seq": state.seq, "logged_seq": state.logged_seq, "stale": state.stale}
    yield _encode({**rank, **position, "blocks": state.block_counts}) + b"\n"
    for block in state.blocks():
        media = [tier.name.lower() for tier in block.tiers]
        row = {**rank, "sequence_hash": block.sequence_hash, "parent": block.parent, "media": media}
        yield _encode(row) + b"\n"
