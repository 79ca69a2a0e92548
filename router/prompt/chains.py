"""Prompts as the router decides on them: tokens, and chains of sequence hashes.

A chain is packed: little-endian u64s of a prompt's full blocks, in their order. A sequence hash names its block and all
before it, so equal hashes mean equal prefixes.
"""

import msgspec

from kv_protocol.hashing import Hashing

TOKEN_BYTES = 4
BLOCK_BYTES = 8


def block_count(chain: bytes) -> int:
    """Return how many blocks `chain` has."""
    return len(chain) // BLOCK_BYTES


class EncodedPrompt(msgspec.Struct, frozen=True):
    """Tokens, and the sequence hashes of their full blocks as little-endian u64s.

    `tokens` are ids as little-endian u32s, or characters whose code points are the ids. With images there are none: the
    worker makes its own. `token_count` then is the least that it has, and hashes there are of the blocks that are
    known. `unrendered`: the field for which the prompt is not known here, and hashes are of its text; empty: it is.
    """

    tokens: bytes | str
    token_count: int
    hashing: Hashing
    sequence_hashes: bytes
    unrendered: str = ""

    @property
    def ids(self) -> bytes:
        """The tokens as little-endian u32s."""
        tokens = self.tokens
        return tokens if isinstance(tokens, bytes) else tokens.encode("utf-32-le")
