"""Engine events in one vocabulary, between dialects and the mirror.

Hashes are the engine's own, as u64s: the dialects convert all other spellings.
"""

from typing import NamedTuple

import msgspec

from kv_protocol.events import Tier
from kv_protocol.hashing import Namespace


class EngineStored(msgspec.Struct, frozen=True, kw_only=True):
    """An engine holds these blocks on `tier`, in chain order; `parent_block_hash` is the block before the first.

    `token_ids` are the blocks' tokens, `block_size` for each block. With `is_eagle` one more token follows: a block's
    content is then its own tokens and the next one. `token_ids` is empty if the engine only names blocks that it
    described before (`names_only`). `mm_hashes[i]` are the multimodal hashes (u64) of block i; () for text. `group_idx`
    is the attention group of this copy: a block is usable once all groups hold a copy.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    tier: Tier = Tier.GPU
    namespace: Namespace = Namespace()
    mm_hashes: tuple[tuple[int, ...], ...] = ()
    is_eagle: bool = False
    group_idx: int = 0

    @property
    def names_only(self) -> bool:
        """Whether the event has block names without their tokens."""
        return not self.token_ids


class EngineRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """The attention group `group_idx` no longer holds these blocks on `tier`."""

    block_hashes: tuple[int, ...]
    tier: Tier = Tier.GPU
    group_idx: int = 0


class EngineCleared(msgspec.Struct, frozen=True):
    """The engine's cache is empty, on all tiers."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class RankEvent(NamedTuple):
    """An event of one rank."""

    dp_rank: int
    event: EngineEvent


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one message of a publisher, or of one poll.

    `dp_rank` is None if the message names none. `refused` has the problem of each unreadable event. Events that
    say nothing about prefixes are left out: those of other attention groups, and of remote copies.
    """

    sequence: int
    time_s: float
    dp_rank: int | None
    events: tuple[EngineEvent, ...]
    refused: tuple[str, ...] = ()
