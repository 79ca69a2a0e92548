"""Changes of one rank's KV cache, in canonical form: sequence hashes, no token ids, no engine hashes.

An event changes one tier. A block that moves between tiers is a `Stored` on the new tier, then a `Removed` from the
old one. The hashes of a `Stored` are in chain order: block i's parent is block i - 1, block 0's is `parent`.
"""

from enum import IntEnum

import msgspec

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import checked_u64

U32_LIMIT = 1 << 32
I64_LIMIT = 1 << 63


class Tier(IntEnum):
    """The tier of a block. The values are the wire's (`docs/WIRE.md`, canonical batch)."""

    GPU = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


TIERS = tuple(Tier)


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that the rank now holds on `tier`; `start` is the position of the first of them in its sequence."""

    sequence_hashes: tuple[int, ...]
    parent: int | None = None
    start: int = 0
    tier: Tier = Tier.GPU

    def __post_init__(self) -> None:
        if not self.sequence_hashes:
            raise LimitExceeded("sequence_hashes", 0, "at least one block")
        if (self.parent is None) != (self.start == 0):
            raise LimitExceeded("start", self.start, "0 without a parent, more than 0 with one")
        if not 0 <= self.start <= U32_LIMIT - len(self.sequence_hashes):
            raise LimitExceeded("start", self.start, "a u32, as the positions of all its blocks")
        if self.parent is not None:
            checked_u64("parent", self.parent)


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks that the rank no longer holds on `tier`, in any order."""

    sequence_hashes: tuple[int, ...]
    tier: Tier = Tier.GPU

    def __post_init__(self) -> None:
        if not self.sequence_hashes:
            raise LimitExceeded("sequence_hashes", 0, "at least one block")


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The rank holds nothing on `tier` any more."""

    tier: Tier = Tier.GPU


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One numbered event of a stream. `seq` counts from 1 within an epoch without holes.

    `source_seq` is the number of the engine-side message that caused it (a barrier for tests, a measure of freshness);
    `engine_time_ns` is the engine side's wall clock when that message was made, in ns since 1970.
    """

    epoch: int
    seq: int
    event: Event
    source_seq: int = 0
    engine_time_ns: int = 0

    def __post_init__(self) -> None:
        for field in ("epoch", "seq", "source_seq"):
            checked_u64(field, getattr(self, field))
        if self.seq < 1:
            raise LimitExceeded("seq", self.seq, "1 or more")
        if not -I64_LIMIT <= self.engine_time_ns < I64_LIMIT:
            raise LimitExceeded("engine_time_ns", self.engine_time_ns, "i64")
