"""Checkpoint records of a router's journal: the state that decisions read, at one moment.

    CheckpointBegan    the time, and the settings of the empty state
    CheckpointPart     rows of one table of the state, in order; a table may have any number of parts
    CheckpointEnded    the number of parts

The tables are those of `router/journal/checkpoint.py` and of the core (`router/native/core.cpp`), in the writer's
version. A router of another version refuses unknown tables, and its replay starts at a later checkpoint.
"""

from typing import Any

import msgspec

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import checked_worker_id


class CheckpointBegan(msgspec.Struct, frozen=True, tag="checkpoint", array_like=True, kw_only=True):
    """A checkpoint of the state follows, as of the tick at `now_s`."""

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
    """The checkpoint is complete if `parts` parts came before."""

    now_s: float
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 0:
            raise LimitExceeded("parts", self.parts, "0 or more")
