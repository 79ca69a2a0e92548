"""Checkpoint records of a router's journal: all that a decision may read, as it was at one moment.

    CheckpointBegan    the moment, and the settings that an empty state is made of
    CheckpointPart     rows of one table of the state, in their order; a table may take any number of parts
    CheckpointEnded    how many parts there were

The tables are those of `router/journal/checkpoint.py`, their rows those of `checkpoint_rows.py`, as the writer has
them. A router of another version refuses a table that it does not know, and its replay starts at a later checkpoint.
"""

from typing import Any

import msgspec

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import checked_worker_id


class CheckpointBegan(msgspec.Struct, frozen=True, tag="checkpoint", array_like=True, kw_only=True):
    """A checkpoint of the state follows, as it was when time was let pass until `now_s`."""

    now_s: float
    router: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        checked_worker_id(self.router)


class CheckpointPart(msgspec.Struct, frozen=True, tag="checkpoint_part", array_like=True, kw_only=True):
    """Rows of one table: `rows` is a msgpack list of them."""

    now_s: float
    table: str
    rows: bytes


class CheckpointEnded(msgspec.Struct, frozen=True, tag="checkpoint_end", array_like=True, kw_only=True):
    """The checkpoint is whole, if so many parts came before."""

    now_s: float
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 0:
            raise LimitExceeded("parts", self.parts, "0 or more")
