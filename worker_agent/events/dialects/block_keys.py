"""Keys of a block's content beside its tokens: multimodal items and the cache salt.

    block_mm_infos   {"mm_objects": [{"mm_hash": n}]}               n is the number of an item
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

from collections.abc import Sequence
from typing import Any, NamedTuple

from kv_protocol.hashing import to_u64
from kv_protocol.mm_keys import is_digest, mm_hash
from worker_agent.events.dialects.wire_events import WireMmInfo, WireStored

SALT_TAG = "dynamo-cache-salt:"

MmHashes = tuple[tuple[int, ...], ...]


class BlockKeys(NamedTuple):
    """The keys of a store's blocks: `mm_hashes` has a tuple for each block, or is () if all are text."""

    mm_hashes: MmHashes
    cache_salt: str | None
    unexplained: int


def block_keys(wire: WireStored, blocks: int) -> BlockKeys:
    """Return the keys of the first `blocks` blocks."""
    salt = wire.cache_salt or None
    mm_hashes = _of_infos((wire.block_mm_infos or ())[:blocks], blocks)
    unexplained = 0
    for keys_of_blocks in (wire.mm_keys, wire.extra_keys):
        if keys_of_blocks and any(keys_of_blocks):
            named, unknown = _of_keys(keys_of_blocks[:blocks], wire.lora_name)
            mm_hashes = mm_hashes or _aligned(named, blocks)
            unexplained += unknown
    return BlockKeys(mm_hashes, salt or _tagged_salt(wire.extra_keys), unexplained)


def _aligned(of_blocks: Sequence[tuple[int, ...]], blocks: int) -> MmHashes:
    return (*of_blocks, *[()] * (blocks - len(of_blocks))) if any(of_blocks) else ()


def _of_infos(infos: Sequence[WireMmInfo | None], blocks: int) -> MmHashes:
    return _aligned([tuple(to_u64(item.mm_hash) for item in info.mm_objects) if info else () for info in infos], blocks)


def _of_keys(keys_of_blocks: list[Any], lora_name: str | None) -> tuple[list[tuple[int, ...]], int]:
    named, unexplained = [], 0
    for keys in keys_of_blocks:
        names = []
        for key in (keys if isinstance(keys, list) else [keys]) if keys else ():
            name = _item(key)
            if name is not None:
                names.append(mm_hash(name))
            elif key != lora_name and not _is_tagged(key):
                unexplained += 1
        named.append(tuple(names))
    return named, unexplained


def _item(key: object) -> str | None:
    """Return the name of the multimodal item if the key identifies one; None otherwise."""
    match key:
        case [str(name), int(), *_] if name:
            return name
        case {"hash": str(name)} if name:
            return name
        case str(name) if is_digest(name):
            return name
    return None


def _is_tagged(key: object) -> bool:
    return isinstance(key, str) and key.startswith(SALT_TAG)


def _tagged_salt(extra_keys: list[list[Any] | None] | None) -> str | None:
    first = extra_keys[0] if extra_keys else None
    return next((key.removeprefix(SALT_TAG) for key in first or () if _is_tagged(key)), None) or None
