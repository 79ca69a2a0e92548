"""Parses TensorRT-LLM's polled KV events: every version's JSON into checked values.

    event_id            counts one rank's events
    attention_dp_rank   absent or null without attention DP: rank 0
    window_size         of the pool, in tokens; absent or null if the engine knows no windows: `UNBOUNDED`
    layer_group_id      KV cache manager V2: the attention group; absent or null: 0
    hash_algo           V2; `v1_block_key`, `v2_sha256_64`, `v2_sha256`
    hash                u64, spelled as u64 or i64; 64 hex digits (`v2_sha256`): its first 16 as a number, which is what
                        the engine calls `v2_sha256_64`; null: a block that cannot be named. A `stored` is refused if a
                        hash is twice in it, or if its parent is one of its own blocks
    token_id            u32; V2 has a 64-hex digest for the first token of a multimodal item: its pad value is taken
                        (`docs/SOURCES.md` E6, rule 6), the identity itself is in the block's `mm_keys`
    mm_keys             an item's name is its `uuid` if it has one (V2, whose `hash` is derived from UUID and content),
                        else its `hash`: a digest, or the caller's UUID
    cache_salt          in blocks or in `data`; empty or null: none; an event with two different salts is refused
    cache_level         0 GPU, 1 host; in `updated` only the new value is read, a null diff is no change
    all else            skipped

An event above `EVENT_NUMBERS_MAX` or `TEXT_BYTES_MAX` is refused: applying it would hold up the event loop.

Source: `docs/SOURCES.md` E1.3; V2: NVIDIA/TensorRT-LLM `tensorrt_llm/runtime/kv_cache_hash.py` @ 991de58c
(`truncate_sha256_hash_to_int64`), `tensorrt_llm/runtime/kv_cache_manager_v2/_event_manager.py` @ 1c39d359
(`_normalize_block_hash`), `docs/source/features/kvcache.md` @ 0076e939 (`mm_keys[].uuid`).
"""

from typing import Annotated, cast

import msgspec
from msgspec import Meta

from kv_protocol.errors import LimitExceeded
from kv_protocol.events import Tier
from kv_protocol.hashing import Namespace, image_pad, is_digest, mm_hash, to_u64
from kv_protocol.ids import DP_RANK_MAX, TokenId
from kv_protocol.splitmix import U64_MASK
from worker_agent.events.quarantine import EventTooLarge

UNBOUNDED = 1 << 63
"""The window of a pool that has none: wider than every other."""
EVENT_ID_MAX = (1 << 63) - 1
EVENT_NUMBERS_MAX = 1 << 22
"""How many tokens and hashes an event may have; a multimodal item counts as `_ITEM_NUMBERS` of them."""
TEXT_BYTES_MAX = 1 << 16
"""The longest adapter name or salt, in UTF-8 bytes."""
_ITEM_NUMBERS = 8
_GROUP_IDX_MAX = 1023
_HASH_ALGOS = (None, "v1_block_key", "v2_sha256_64", "v2_sha256")
_HASH_DIGITS = 16
"""Hex digits of a u64."""
_TIER_OF_LEVEL = {0: Tier.GPU, 1: Tier.HOST}
_MM_KEY = "mm_key"


class TrtllmHead(msgspec.Struct, frozen=True):
    """The fields that place an event in its rank's stream."""

    event_id: Annotated[int, Meta(ge=-EVENT_ID_MAX, le=EVENT_ID_MAX)]
    attention_dp_rank: Annotated[int, Meta(ge=0, le=DP_RANK_MAX)] | None = None

    @property
    def dp_rank(self) -> int:
        """The rank; 0 if none is named."""
        return self.attention_dp_rank or 0


class TrtllmBlock(msgspec.Struct, frozen=True):
    """One stored block, full or partial; `block_hash` is None if it cannot be named."""

    block_hash: int | None
    token_ids: tuple[int, ...]
    tier: Tier
    mm_hashes: tuple[int, ...]
    named_items: int = 0
    """How many of its multimodal items have the caller's name instead of a digest."""


class TrtllmStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in chain order; `parent_hash` is the block before the first."""

    parent_hash: int | None
    blocks: tuple[TrtllmBlock, ...]
    namespace: Namespace


class TrtllmRemoved(msgspec.Struct, frozen=True):
    """Removed blocks; None: a block that cannot be named."""

    block_hashes: tuple[int | None, ...]


class TrtllmUpdated(msgspec.Struct, frozen=True):
    """A block moved to `tier` (None: it did not move), its priority changed, or both."""

    block_hash: int | None
    tier: Tier | None
    priority_changed: bool


BlockChange = TrtllmStored | TrtllmRemoved | TrtllmUpdated


class TrtllmEvent(msgspec.Struct, frozen=True):
    """One event, parsed. `change` is None if the event only reports that the pool of this window was created."""

    window: int
    group_idx: int
    change: BlockChange | None


class _UniqueToken(msgspec.Struct, gc=False):
    token_id: TokenId | str


class _MmKey(msgspec.Struct):
    type: str = _MM_KEY
    hash: str | None = None
    uuid: str | None = None


class _StoredBlock(msgspec.Struct):
    block_hash: int | str | None
    tokens: list[_UniqueToken]
    cache_level: int = 0
    mm_keys: list[_MmKey] | None = None
    cache_salt: str | None = None


class _EventDiff(msgspec.Struct):
    new_value: int


class _CreatedData(msgspec.Struct, tag="created"):
    pass


class _StoredData(msgspec.Struct, tag="stored"):
    parent_hash: int | str | None
    blocks: list[_StoredBlock]
    lora_name: str | None = None
    cache_salt: str | None = None


class _RemovedData(msgspec.Struct, tag="removed"):
    block_hashes: list[int | str | None]


class _UpdatedData(msgspec.Struct, tag="updated"):
    block_hash: int | str | None
    cache_level: _EventDiff | None = None
    priority: _EventDiff | None = None


class _Body(msgspec.Struct):
    data: _CreatedData | _StoredData | _RemovedData | _UpdatedData
    window_size: Annotated[int, Meta(ge=0, le=UNBOUNDED - 1)] | None = None
    layer_group_id: Annotated[int, Meta(ge=0, le=_GROUP_IDX_MAX)] | None = None
    hash_algo: str | None = None


def read_head(engine_event: object) -> TrtllmHead:
    """Return the event's place; raise one of `UNDECODABLE` if it has none."""
    return msgspec.convert(engine_event, TrtllmHead)


def read_event(engine_event: object) -> TrtllmEvent:
    """Return the parsed event.

    Raises:
        EventTooLarge: it is well-formed, but too large to be published.
        LimitExceeded: it is well-formed, but cannot be published for another reason, which the message has.
        msgspec.ValidationError, ValueError: it is not well-formed.
    """
    body = msgspec.convert(engine_event, _Body)
    if body.hash_algo not in _HASH_ALGOS:
        raise LimitExceeded("hash_algo", body.hash_algo, ", ".join(filter(None, _HASH_ALGOS)))
    window = UNBOUNDED if body.window_size is None else body.window_size
    return TrtllmEvent(window, body.layer_group_id or 0, _change(body.data))


def _change(data: _CreatedData | _StoredData | _RemovedData | _UpdatedData) -> BlockChange | None:
    match data:
        case _StoredData():
            return _stored(data)
        case _RemovedData():
            _check_size("block_hashes", len(data.block_hashes))
            return TrtllmRemoved(tuple(_hash(found) for found in data.block_hashes))
        case _UpdatedData():
            tier = None if data.cache_level is None else _tier(data.cache_level.new_value)
            return TrtllmUpdated(_hash(data.block_hash), tier, data.priority is not None)
        case _CreatedData():
            return None


def _check_size(field: str, numbers: int) -> None:
    if numbers > EVENT_NUMBERS_MAX:
        raise EventTooLarge(field, f"{numbers} numbers", f"at most {EVENT_NUMBERS_MAX} an event")


def _stored(data: _StoredData) -> TrtllmStored:
    items = sum(len(block.mm_keys) for block in data.blocks if block.mm_keys)
    _check_size("blocks", sum(1 + len(block.tokens) for block in data.blocks) + _ITEM_NUMBERS * items)
    parent_hash, blocks = _hash(data.parent_hash), tuple(map(_block, data.blocks))
    names = [block.block_hash for block in blocks if block.block_hash is not None]
    if len({*names, parent_hash}) <= len(names):
        raise LimitExceeded("block_hash", "a hash twice, or the parent", "each block once, below its parent")
    namespace = Namespace(lora_name=_text("lora_name", data.lora_name), cache_salt=_salt(data))
    return TrtllmStored(parent_hash=parent_hash, blocks=blocks, namespace=namespace)


def _block(block: _StoredBlock) -> TrtllmBlock:
    found = [key.uuid or key.hash for key in block.mm_keys or () if key.type == _MM_KEY]
    identities = [identity for identity in found if identity]
    return TrtllmBlock(
        _hash(block.block_hash),
        _token_ids([token.token_id for token in block.tokens]),
        _tier(block.cache_level),
        tuple(map(mm_hash, identities)),
        sum(not is_digest(identity) for identity in identities),
    )


def _hash(found: int | str | None) -> int | None:
    if found is None:
        return None
    if isinstance(found, str) and is_digest(found):
        return int(found[:_HASH_DIGITS], 16)
    if isinstance(found, str) or not -(1 << 63) <= found <= U64_MASK:
        raise LimitExceeded("block_hash", found, "u64, or 64 hex digits")
    return to_u64(found)


def _token_ids(found: list[int | str]) -> tuple[int, ...]:
    if str in map(type, found):
        return tuple(token_id if isinstance(token_id, int) else _pad(token_id) for token_id in found)
    return cast("tuple[int, ...]", tuple(found))  # the usual case: no Python loop over tokens


def _pad(digest: str) -> int:
    if not is_digest(digest):
        raise LimitExceeded("token_id", digest, "u32, or the 64 hex digits of a multimodal item")
    return image_pad(mm_hash(digest))


def _tier(level: int) -> Tier:
    if level not in _TIER_OF_LEVEL:
        raise LimitExceeded("cache_level", level, "0 (GPU), 1 (host)")
    return _TIER_OF_LEVEL[level]


def _salt(data: _StoredData) -> str | None:
    salts = {salt for salt in (data.cache_salt, *(block.cache_salt for block in data.blocks)) if salt}
    if len(salts) > 1:
        raise LimitExceeded("cache_salt", sorted(salts), "one salt an event")
    return _text("cache_salt", next(iter(salts), None))


def _text(field: str, found: str | None) -> str | None:
    size = 0 if found is None else len(found.encode())  # raises for text that UTF-8 cannot encode
    if size > TEXT_BYTES_MAX:
        raise EventTooLarge(field, f"{size} bytes", f"at most {TEXT_BYTES_MAX}")
    return found
