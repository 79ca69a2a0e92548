"""Chains of sequence hashes, packed: little-endian u64s of a prompt's full blocks, in their order.

A sequence hash names its block and all before it, so equal hashes mean equal prefixes.
"""

BLOCK_BYTES = 8


def block_count(chain: bytes) -> int:
    """Return how many blocks `chain` has."""
    return len(chain) // BLOCK_BYTES
