"""Changes of the index that a stream's state machine returns, in order."""

import msgspec

from kv_protocol.events import Event
from kv_protocol.recovery import BlockColumns


class ApplyEvent(msgspec.Struct, frozen=True):
    """Fold one event in."""

    event: Event


class ReplaceAll(msgspec.Struct, frozen=True):
    """The rank holds exactly the blocks of these chunks (parents first)."""

    chunks: tuple[BlockColumns, ...] = ()


class RepairBuckets(msgspec.Struct, frozen=True):
    """In these buckets the rank holds exactly the blocks of the chunks; other buckets do not change."""

    buckets: bytes
    chunks: tuple[BlockColumns, ...] = ()


Effect = ApplyEvent | ReplaceAll | RepairBuckets
