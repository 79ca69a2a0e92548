"""Decodes one event in any of its forms; `batches.py` decides what it means.

    map       key `type` and the fields by name; unknown keys are skipped
    array     the fields of `_STORED_HEAD` or `_REMOVED_HEAD` by position, the tag first; then a tail:
              fixed    the first four slots have the `_FIXED_TYPES`, or are nil: the tail is read by position
              legacy   any other tail, of any length, is read by type: the first list is `block_mm_infos`, the first
                       int the group, the first string the kind; all else (a second int is the window) is skipped
              metadata a map in any slot of a store from `lora_name` on: only its `cache_salt` is read, the slot itself
                       counts as empty, as does the slot of `extra_keys` with a text: a session's name (old SGLang)
    tokens    u32s, or pairs of neighbours (a,b)(b,c)(c,d), which are read as a..d and make the event Eagle's
    lookahead for each block the tokens after it that its hash covers, of which only the first is read; makes it Eagle's

`ownership` (a secondary tier's copy is a copy) and `session_id` (a session owns no block) are skipped. The usual form
(map, plain tokens) is one typed decode. Source: `docs/SOURCES.md` E3.2, E3.4.

Keys of a block's content beside its tokens: multimodal items and the cache salt.

    block_mm_infos   {"mm_objects": [{"mm_hash": n}]}               n is the hash of an item
    mm_keys and      {"hash": name}                                 the name of an item
    extra_keys       [name, offset]                                 the name of an item
                     64 hex digits                                  the name of an item
                     "dynamo-cache-salt:" + salt                    the salt, if it is in `extra_keys` of the first
                                                                      block, and `cache_salt` is empty; else ignored
                     the event's `lora_name`                        ignored: the field has it
                     anything else                                  unexplained: counted and ignored

Each field is a list with an entry for each block, nil for a block of text. Missing entries mean text, surplus ones are
ignored. If several fields have items, only those of the first in this order count. Some engines send the salt without
the tag: it is not read, because it looks like any other key. Source: `docs/SOURCES.md` E1.3, E3.2, E3.3.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded
from kv_protocol.hashing import Namespace, is_digest, mm_hash, to_u64
from kv_protocol.ids import TokenId

GROUP_IDX_MAX = 255
"""More attention groups than any engine's model has; it bounds the memory of their kinds."""

EngineHash = int | bytes
GroupIdx = Annotated[int, msgspec.Meta(ge=0, le=GROUP_IDX_MAX)]


class WireMmObject(msgspec.Struct):
    """A multimodal item of a block."""

    mm_hash: int


class WireMmInfo(msgspec.Struct):
    """The multimodal items of a block."""

    mm_objects: list[WireMmObject]


class WireBlocks(msgspec.Struct, kw_only=True):
    """The fields that stores and removals share, as publishers send them; only types are checked."""

    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


IGNORED: Mapping[str, tuple[str, Callable[[str | None], bool]]] = {
    "locality": ("ignored_not_local", lambda locality: locality not in (None, "LOCAL")),  # another engine's copy
    "medium": ("ignored_medium", frozenset({"FS", "OBJ"}).__contains__),  # storage behind an offload connector: no tier
}
"""The fields of `WireBlocks` that can say by themselves that an event has no meaning for prefixes.

For each field: what the event is then counted as, and the test of its value. The first that applies counts.
"""


class WireStored(WireBlocks, tag="BlockStored", kw_only=True):
    """`BlockStored`, with the fields that only a store has."""

    parent_block_hash: EngineHash | None
    token_ids: tuple[TokenId, ...]
    block_size: Annotated[int, msgspec.Meta(ge=0)]
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    block_mm_infos: list[WireMmInfo | None] | None = None
    mm_keys: list[Any] | None = None
    lookahead_token_ids: list[Annotated[list[TokenId], msgspec.Meta(min_length=1)]] | None = None


class WireRemoved(WireBlocks, tag="BlockRemoved"):
    """`BlockRemoved`."""


class WireCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """`AllBlocksCleared`; its further fields (a kind of source) are not read."""


class WireIgnored(msgspec.Struct, tag="Ignored"):
    """An event that its publisher marks as ignored."""


WireEvent = WireStored | WireRemoved | WireCleared | WireIgnored

_STORED_HEAD = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys"),
)
_REMOVED_HEAD = ("type", "block_hashes", "medium")
_METADATA_FROM = _STORED_HEAD.index("lora_name")
_FIXED_TAIL = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality")
_FIXED_TYPES = (int, str, int, str)

_decode_usual = msgspec.msgpack.Decoder(WireEvent).decode
_decode_any = msgspec.msgpack.Decoder().decode


def read_event(raw: msgspec.Raw) -> tuple[WireEvent, bool]:
    """Return the event, and whether it is Eagle's; raise one of `UNDECODABLE` if it is not an event."""
    try:
        event, is_eagle = _decode_usual(raw), False
    except UNDECODABLE:
        event, is_eagle = _unusual(_decode_any(raw))
    if isinstance(event, WireStored) and event.lookahead_token_ids:
        return _with_next_token(event, event.lookahead_token_ids), True
    return event, is_eagle


def _unusual(value: object) -> tuple[WireEvent, bool]:
    fields = _by_name(value) if isinstance(value, list) else value
    is_eagle = False
    if isinstance(fields, dict):
        match fields.get("token_ids"):
            case [[*_], *_] as pairs:
                is_eagle = True
                fields = {**fields, "token_ids": _unpaired(pairs)}
    return msgspec.convert(fields, WireEvent, builtin_types=(bytes,)), is_eagle  # bytes: text is not decoded as base64


def _unpaired(pairs: list[object]) -> tuple[int, ...]:
    firsts, seconds = zip(*msgspec.convert(pairs, list[tuple[TokenId, TokenId]]), strict=True)
    if firsts[1:] != seconds[:-1]:
        raise LimitExceeded("token_ids", "pairs that are no chain", "(a,b)(b,c)(c,d)...")
    return (*firsts, seconds[-1])


def _with_next_token(wire: WireStored, lookahead: list[list[TokenId]]) -> WireStored:
    nexts = [tokens[0] for tokens in lookahead]
    following = wire.token_ids[wire.block_size :: wire.block_size] if wire.block_size else ()
    if following != tuple(nexts[:-1]):
        raise LimitExceeded("lookahead_token_ids", "tokens that do not follow their blocks", "the next tokens")
    return msgspec.structs.replace(wire, token_ids=(*wire.token_ids, nexts[-1]))


def _by_name(slots: list[Any]) -> dict[str, Any]:
    match slots:
        case ["BlockStored", *_]:
            return _stored_by_name(slots)
        case ["BlockRemoved", *_]:
            return dict(zip(_REMOVED_HEAD, slots, strict=False)) | _tail(slots[len(_REMOVED_HEAD) :])
    return {"type": slots[0]} if slots else {}


def _stored_by_name(slots: list[Any]) -> dict[str, Any]:
    later = slots[_METADATA_FROM:]
    slots = slots[:_METADATA_FROM] + [None if isinstance(slot, dict) else slot for slot in later]
    fields = dict(zip(_STORED_HEAD, slots, strict=False)) | _tail(slots[len(_STORED_HEAD) :])
    if isinstance(fields.get("extra_keys"), str):
        fields["extra_keys"] = None
    for slot in later:
        if isinstance(slot, dict) and "cache_salt" in slot:
            fields["cache_salt"] = slot["cache_salt"]
    return fields


def _tail(slots: list[Any]) -> dict[str, Any]:
    is_fixed = len(slots) >= len(_FIXED_TYPES) and all(
        slot is None or type(slot) is kind for slot, kind in zip(slots, _FIXED_TYPES, strict=False)
    )
    return dict(zip(_FIXED_TAIL, slots, strict=False)) if is_fixed else _legacy_tail(slots)


def _legacy_tail(slots: list[Any]) -> dict[str, Any]:
    first_of: dict[type, Any] = {}
    for slot in slots:
        first_of.setdefault(type(slot), slot)
    names = {list: "block_mm_infos", int: "group_idx", str: "kv_cache_spec_kind"}
    return {names[kind]: slot for kind, slot in first_of.items() if kind in names}


SALT_TAG = "dynamo-cache-salt:"

MmHashes = tuple[tuple[int, ...], ...]


def block_keys(wire: WireStored, blocks: int) -> tuple[MmHashes, Namespace, int]:
    """Return the multimodal hashes of the first `blocks` blocks, their namespace, and how many keys are unexplained.

    The hashes are a tuple for each block, or () if every block is text.
    """
    namespace = Namespace(*[getattr(wire, field) for field in Namespace._fields])
    if not namespace.cache_salt:
        namespace = namespace._replace(cache_salt=_tagged_salt(wire.extra_keys))
    mm_hashes: MmHashes = ()
    unexplained = 0
    for keys_of_blocks in (wire.block_mm_infos, wire.mm_keys, wire.extra_keys):
        if keys_of_blocks and any(keys_of_blocks):
            found = [_items(keys, wire.lora_name) for keys in keys_of_blocks[:blocks]]
            unexplained += sum(unknown for _, unknown in found)
            if not mm_hashes and any(items for items, _ in found):
                mm_hashes = (*(items for items, _ in found), *[()] * (blocks - len(found)))
    return mm_hashes, namespace, unexplained


def _items(keys: object, lora_name: str | None) -> tuple[tuple[int, ...], int]:
    """Return the multimodal hashes in the keys of one block, and how many of its keys are unexplained."""
    listed = keys.mm_objects if isinstance(keys, WireMmInfo) else keys if isinstance(keys, list) else [keys]
    items, unexplained = [], 0
    for key in listed if keys else ():
        if (item := _item(key)) is not None:
            items.append(item)
        elif key != lora_name and not _is_tagged(key):
            unexplained += 1
    return tuple(items), unexplained


def _item(key: object) -> int | None:
    """Return the hash of the multimodal item if the key identifies one; None otherwise."""
    match key:
        case WireMmObject():
            return to_u64(key.mm_hash)
        case [str(name), int(), *_] | {"hash": str(name)} if name:
            return mm_hash(name)
        case str(name) if is_digest(name):
            return mm_hash(name)
    return None


def _is_tagged(key: object) -> bool:
    return isinstance(key, str) and key.startswith(SALT_TAG)


def _tagged_salt(extra_keys: list[list[Any] | None] | None) -> str | None:
    first = extra_keys[0] if extra_keys else None
    return next((key.removeprefix(SALT_TAG) for key in first or () if _is_tagged(key)), None) or None
