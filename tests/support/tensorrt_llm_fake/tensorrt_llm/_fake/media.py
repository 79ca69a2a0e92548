"""Media in prompts: each item becomes `tokens_per_item` tokens, and keys in the hashes of the blocks that it lies in.

    place      where the text says `<image>`, in turn; items without a place come first
    token      the vocabulary's size: no text has it (as for models that hash by content)
    digest     SHA-256 of the item's bytes, 64 hex digits; the real one takes BLAKE3 of the pixels: opaque to readers
    hash ints  the digest as eight signed 32-bit words, big-endian
    uuid       the caller's, or one of the digest where the control asks for it

Source: `event_plane.md` section 1.3 (`mm_keys`); `start_offset` is where in the item the block begins.
"""

import hashlib
import struct
import uuid as uuids
from dataclasses import dataclass
from typing import Any

from .cache import MmKeys
from .control import control

PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class MediaItem:
    """One item, and the tokens [start, start + length) of the prompt that stand for it."""

    digest: str
    uuid: str | None
    start: int = 0
    length: int = 0

    @property
    def words(self) -> list[int]:
        """Return the digest as eight signed 32-bit ints."""
        return list(struct.unpack(">8i", bytes.fromhex(self.digest)))


def items_of(inputs: dict[str, Any]) -> list[MediaItem]:
    """Return the items of a prompt in the order of its modalities.

    Raises:
        ValueError: the UUIDs are not as many as the items.
    """
    found: list[MediaItem] = []
    for modality, data in (inputs.get("multi_modal_data") or {}).items():
        each = data if isinstance(data, list) else [data]
        named = (inputs.get("multi_modal_uuids") or {}).get(modality) or [None] * len(each)
        if len(named) != len(each):
            raise ValueError(f"multi_modal_uuids['{modality}'] has {len(named)} entries for {len(each)} items")
        for item, name in zip(each, named, strict=True):
            digest = hashlib.sha256(_bytes(item)).hexdigest()
            given = name or (str(uuids.UUID(digest[:32])) if control.uuid_keys else None)
            found.append(MediaItem(digest, given))
    return found


def expand(before: list[list[int]], items: list[MediaItem], token: int) -> tuple[list[int], list[MediaItem]]:
    """Return the prompt with the items between the texts' tokens, and the items with their places."""
    prompt: list[int] = []
    placed: list[MediaItem] = []
    length = control.model.tokens_per_item
    unplaced = max(0, len(items) - (len(before) - 1))
    rest = iter(items)
    for index, tokens in enumerate(before):
        for _ in range(unplaced if index == 0 else 1):
            item = next(rest, None)
            if item is not None:
                placed.append(MediaItem(item.digest, item.uuid, len(prompt), length))
                prompt += [token] * length
        prompt += tokens
    return prompt, placed


def keys_between(items: list[MediaItem], start: int, end: int) -> MmKeys:
    """Return the keys of a block of the tokens [start, end)."""
    inside = [each for each in items if each.start < end and start < each.start + each.length]
    return tuple((each.digest, max(0, start - each.start), each.uuid) for each in inside)


def handle_of(item: MediaItem, tokens: int) -> dict[str, Any]:
    """Return what stands for an item's embedding, shaped as a shared tensor's handle is."""
    return {
        "method_key": 1,
        "tensor_size": [tokens, 8],
        "tensor_stride": [8, 1],
        "tensor_offset": 0,
        "storage_handle": item.digest,
        "storage_size_bytes": tokens * 16,
        "dtype": "torch.float16",
    }


def _bytes(item: Any) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode()
    tobytes = getattr(item, "tobytes", None)
    return bytes(tobytes()) if tobytes is not None else repr(item).encode()
