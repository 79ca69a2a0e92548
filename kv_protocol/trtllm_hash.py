"""TensorRT-LLM's own block hash (V1), for simulated engines.

Source: `docs/SOURCES.md` E1.6; vectors in `tests/golden/hash_vectors.json`.
"""

from collections.abc import Sequence
from functools import lru_cache

from kv_protocol.splitmix import U64_MASK

_U32_MASK = 0xFFFF_FFFF
_GOLDEN = 0x9E37_79B9
_PARENT_FACTOR = 0xBF58_476D_1CE4_E5B9


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


def trtllm_block_hash(
    tokens: Sequence[int],
    parent: int = 0,
    *,
    lora_task_id: int | None = None,
    cache_salt_id: int | None = None,
) -> int:
    """Return the engine hash (u64) of a block of `tokens`, full or partial; `parent` is 0 for the first block."""
    state = len(tokens) ^ (parent * _PARENT_FACTOR & U64_MASK)
    if parent == 0 and cache_salt_id is not None:
        state = _mix64(cache_salt_id, state)
    for token in tokens:
        state ^= _mixed32(token) + (state << 6) + (state >> 2) & U64_MASK
    return state if lora_task_id is None else _mix64(lora_task_id, state)
