"""The identity of a cached block: its tokens, all before them, adapter and salt; and the engine's hash of it.

Source of TensorRT-LLM's hash (V1): `docs/SOURCES.md` E1.6; vectors in `tests/golden/hash_vectors.json`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, Self

import msgspec

from kv_protocol.hashing import lora_id
from kv_protocol.splitmix import U64_MASK

_U32_MASK = 0xFFFF_FFFF
_GOLDEN = 0x9E37_79B9
_PARENT_FACTOR = 0xBF58_476D_1CE4_E5B9


class EngineNamespace(msgspec.Struct, frozen=True):
    """Distinguishes equal tokens: the adapter and the salt, and the numbers by which the engine hashes them."""

    lora_name: str | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    cache_salt_id: int | None = None

    @classmethod
    def of(cls, lora_name: str | None, cache_salt: str | None) -> Self:
        """Return the namespace; an empty name or salt is an absent one. Source: `docs/SOURCES.md` E1.6."""
        salt_id = int.from_bytes(sha256(cache_salt.encode()).digest()[:8], "little") if cache_salt else None
        return cls(lora_name or None, cache_salt or None, lora_id(lora_name) if lora_name else None, salt_id)


BlockHash = Callable[[Sequence[int], int, EngineNamespace], int]
"""The engine hash of a block: its tokens, its parent's hash (0: none) and its namespace in, a u64 out."""


class BlockKey(NamedTuple):
    """The key of a block under its parent."""

    parent: "Block | None"
    tokens: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None


class Block:
    """One block of the reuse tree, full or partial: whether it lies on the GPU, how many running sequences have it."""

    __slots__ = ("engine_hash", "key", "on_gpu", "sequences")

    def __init__(self, key: BlockKey, engine_hash: int) -> None:
        self.key = key
        self.engine_hash = engine_hash
        self.on_gpu = True
        self.sequences = 0

    @property
    def parent_hash(self) -> int | None:
        """The engine hash of the block before it."""
        return None if self.key.parent is None else self.key.parent.engine_hash


def trtllm_hash(tokens: Sequence[int], parent: int, namespace: EngineNamespace) -> int:
    """Return TensorRT-LLM's own hash (u64) of a block, full or partial; `parent` is 0 for the first block."""
    lora_task_id, cache_salt_id = namespace.lora_task_id, namespace.cache_salt_id
    state = len(tokens) ^ (parent * _PARENT_FACTOR & U64_MASK)
    if parent == 0 and cache_salt_id is not None:
        state = _mix64(cache_salt_id, state)
    for token in tokens:
        state ^= _mixed32(token) + (state << 6) + (state >> 2) & U64_MASK
    return state if lora_task_id is None else _mix64(lora_task_id, state)


@lru_cache(maxsize=1 << 16)
def _mixed32(value: int) -> int:
    """The token's share of its mixing step, which does not depend on the tokens before it."""
    value &= _U32_MASK
    for _ in range(2):
        value = ((value >> 16) ^ value) * 0x45D9F3B & _U32_MASK
    return ((value >> 16) ^ value) + _GOLDEN & _U32_MASK


def _mix64(value: int, state: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & U64_MASK
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & U64_MASK
    value ^= value >> 31
    return state ^ (value + _GOLDEN + (state << 6) + (state >> 2) & U64_MASK)
