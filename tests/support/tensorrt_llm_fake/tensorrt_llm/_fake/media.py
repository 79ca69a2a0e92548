"""Media in prompts: each item becomes some tokens, and keys in the hashes of the blocks that it lies in.

    an image          `tokens_per_item` tokens; keyed
    embeddings        a token for each row of the tensor; not keyed, as in the real one: a prompt with other embeddings
                      is the same prompt to the cache
    a handle          a token for each row that its `tensor_size` says; keyed by `multimodal_hashes`
    place             where the text says `<image>`, or the tokens have the model's image token; as many as items
    token             the model's image token, or the vocabulary's size: no text has it
    digest            SHA-256 of UUID and pixels, 64 hex digits; the real one takes BLAKE3: opaque to readers
    hash ints         the digest as eight signed 32-bit words, big-endian
    uuid              the caller's, or one of the digest where the control asks for it

Source: `docs/SOURCES.md` E1.3 (`mm_keys`); `inputs/multimodal.py`, `apply_mm_hashes`; `llmapi/llm.py`,
`_preprocess`; `start_offset` is where in the item the block begins.
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Any

from .cache import MmKeys
from .control import control

PLACEHOLDER = "<image>"
_WORDS = ">8i"


@dataclass(frozen=True)
class MediaItem:
    """One item, and the tokens [start, start + length) of the prompt that stand for it; without a digest no key."""

    digest: str
    uuid: str | None
    start: int = 0
    length: int = 0

    @property
    def words(self) -> list[int]:
        """Return the digest as eight signed 32-bit ints."""
        return list(struct.unpack(_WORDS, bytes.fromhex(self.digest)))


class InputProcessor:
    """What places media in a model's prompts, as far as callers look at it."""

    @property
    def supports_token_id_mm_expansion(self) -> bool:
        """Whether it takes a prompt with media as tokens; else they become text, with the tokenizer."""
        return control.model.image_token_id is not None


def items_of(inputs: dict[str, Any]) -> list[MediaItem]:
    """Return the items of a prompt in the order of its modalities; embeddings count where there are no data.

    Raises:
        ValueError: the UUIDs are not as many as the items.
    """
    if inputs.get("multi_modal_data") is None:
        return [
            MediaItem("", None, length=int(tensor.shape[0]))
            for tensors in (inputs.get("multi_modal_embeddings") or {}).values()
            for tensor in (tensors if isinstance(tensors, list) else [tensors])
        ]
    found: list[MediaItem] = []
    for modality, data in inputs["multi_modal_data"].items():
        each = data if isinstance(data, list) else [data]
        named = (inputs.get("multi_modal_uuids") or {}).get(modality) or [None] * len(each)
        if len(named) != len(each):
            raise ValueError(f"multi_modal_uuids['{modality}'] has {len(named)} entries for {len(each)} items")
        for item, name in zip(each, named, strict=True):
            digest = hashlib.sha256((name or "").encode() + _bytes(item)).hexdigest()
            found.append(MediaItem(digest, name, length=control.model.tokens_per_item))
    return found


def items_of_handles(handles: list[dict[str, Any]], hashes: list[list[int]] | None) -> list[MediaItem]:
    """Return the items that an encode worker hands over."""
    return [
        MediaItem(struct.pack(_WORDS, *words).hex(), None, length=handle["tensor_size"][0])
        for handle, words in zip(handles, hashes or [], strict=True)
    ]


def image_token() -> int:
    """Return what stands for media in the engine's prompts."""
    own = control.model.image_token_id
    return control.model.vocab_size if own is None else own


def split_at(tokens: list[int], token: int) -> list[list[int]]:
    """Return the tokens between those that are `token`."""
    parts: list[list[int]] = [[]]
    for each in tokens:
        if each == token:
            parts.append([])
        else:
            parts[-1].append(each)
    return parts


def expand(before: list[list[int]], items: list[MediaItem]) -> tuple[list[int], list[MediaItem]]:
    """Return the prompt with the items between the texts' tokens, and the items with their places.

    Raises:
        ValueError: there are not as many places as items.
    """
    if len(before) != len(items) + 1:
        raise ValueError(f"{len(before) - 1} placeholders for {len(items)} media items: the counts must match")
    prompt, placed = list(before[0]), []
    for item, tokens in zip(items, before[1:], strict=True):
        placed.append(replace(item, start=len(prompt)))
        prompt += [image_token()] * item.length + tokens
    return prompt, placed


def keys_between(items: list[MediaItem], start: int, end: int) -> MmKeys:
    """Return the keys of a block of the tokens [start, end)."""
    inside = [each for each in items if each.digest and each.start < end and start < each.start + each.length]
    return tuple((each.digest, max(0, start - each.start), each.uuid) for each in inside)


def handle_of(item: MediaItem, tokens: int) -> dict[str, Any]:
    """Return what stands for an item's embedding, shaped as a shared tensor's handle is."""
    return {
        "method_key": 1,
        "tensor_size": [tokens, 8],
        "tensor_stride": [8, 1],
        "tensor_offset": 0,
        "storage_handle": control.share_tensor(item.digest),
        "storage_size_bytes": tokens * 16,
        "dtype": control.model.embedding_dtype,
    }


def _bytes(item: Any) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode()
    tobytes = getattr(item, "tobytes", None)
    return bytes(tobytes()) if tobytes is not None else repr(item).encode()
