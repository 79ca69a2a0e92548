"""Hashes of a prompt's blocks, by the C++ core where it was built with xxhash's header."""

import sys
from collections.abc import Sequence

from typing_extensions import Buffer

from indexer.native import core
from kv_protocol.codec import pack_u64
from kv_protocol.errors import LimitExceeded
from kv_protocol.hashing import BASE_SEED, chain, local_block_hashes, pack_tokens, unpack_tokens
from kv_protocol.ids import checked_block_size, checked_u64

_TOKEN_BYTES = 4


def hash_blocks(
    tokens: Sequence[int] | Buffer, block_size: int, seed: int = BASE_SEED, *, is_eagle: bool = False
) -> bytes:
    """Return the sequence hash (little-endian u64) of each full block of a text-only prompt.

    The hashes of `kv_protocol.hashing.sequence_hashes`; `seed` is its `hash_seed`. `tokens` are numbers, or u32s in a
    contiguous buffer (bytes: little-endian). Other threads run while a long buffer is hashed: it must not change.

    Raises:
        LimitExceeded: a token is no u32, a buffer does not consist of u32s, `block_size` or `seed` is out of range.
    """
    checked_block_size(block_size)
    checked_u64("seed", seed)
    data = _u32s(tokens)
    if core.HAS_XXHASH:
        return core.hash_blocks(data, block_size, seed, is_eagle)
    return pack_u64(chain(local_block_hashes(unpack_tokens(bytes(data)), block_size, seed=seed, is_eagle=is_eagle)))


def _u32s(tokens: Sequence[int] | Buffer) -> Buffer:
    """Return the tokens as a buffer of bytes that holds u32s."""
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # no buffer: a sequence
    except TypeError:
        return pack_tokens(tokens)  # type: ignore[arg-type]  # see above
    if not view.c_contiguous or view.format not in {"B", "I", "<I"} or view.nbytes % _TOKEN_BYTES:
        raise LimitExceeded("tokens", f"{view.nbytes} bytes of {view.format!r}", "contiguous u32s")
    return pack_tokens(view.tolist()) if sys.byteorder == "big" and view.format == "I" else view
