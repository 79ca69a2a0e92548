"""The identity of a cached block: its tokens, all before them, adapter and salt; and the engine's hash of it."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple, Self

import msgspec

from kv_protocol.hashing import lora_id
from kv_protocol.trtllm_hash import trtllm_block_hash


class Namespace(msgspec.Struct, frozen=True):
    """What keeps equal tokens apart: the adapter and the salt, and the numbers by which the engine hashes them."""

    lora_name: str | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    cache_salt_id: int | None = None

    @classmethod
    def of(cls, lora_name: str | None, cache_salt: str | None) -> Self:
        """Return the namespace; an empty name or salt is an absent one. Source: `docs/SOURCES.md` E1.6."""
        salt_id = int.from_bytes(sha256(cache_salt.encode()).digest()[:8], "little") if cache_salt else None
        return cls(lora_name or None, cache_salt or None, lora_id(lora_name) if lora_name else None, salt_id)


BlockHash = Callable[[Sequence[int], int, Namespace], int]
"""The engine hash of a block: its tokens, its parent's hash (0: none) and its namespace in, a u64 out."""


def trtllm_hash(tokens: Sequence[int], parent: int, namespace: Namespace) -> int:
    """Return TensorRT-LLM's own hash of a block."""
    lora_task_id, cache_salt_id = namespace.lora_task_id, namespace.cache_salt_id
    return trtllm_block_hash(tokens, parent, lora_task_id=lora_task_id, cache_salt_id=cache_salt_id)


class BlockKey(NamedTuple):
    """By what a block is found under its parent."""

    parent: "Block | None"
    tokens: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None


class Block:
    """One block of the reuse tree, full or partial: whether it lies on the GPU, how many running sequences have it."""

    __slots__ = ("engine_hash", "key", "on_gpu", "priority", "sequences")

    def __init__(self, key: BlockKey, engine_hash: int, priority: int) -> None:
        self.key = key
        self.engine_hash = engine_hash
        self.priority = priority
        self.on_gpu = True
        self.sequences = 0

    @property
    def parent_hash(self) -> int | None:
        """The engine hash of the block before it."""
        return None if self.key.parent is None else self.key.parent.engine_hash
