"""Chains of sequence hashes, packed: little-endian u64s of a prompt's full blocks, in their order.

A block is named by the chain up to its end. A sequence hash names its block and all before it, so chains that share
blocks share them from the first one on. Each block counts once, however many chains have it.
"""

from collections.abc import Container, Iterable
from itertools import takewhile

BLOCK_BYTES = 8


def prefixes(chain: bytes) -> list[bytes]:
    """Return the names of the chain's blocks."""
    return [chain[:end] for end in range(BLOCK_BYTES, len(chain) + 1, BLOCK_BYTES)]


def blocks_of(chains: Iterable[bytes]) -> set[bytes]:
    """Return the distinct blocks of all chains."""
    return {block for chain in chains for block in prefixes(chain)}


def depth(chain: bytes, held: Container[bytes]) -> int:
    """Return how many leading blocks of the chain are held."""
    return len(list(takewhile(lambda block: block in held, prefixes(chain))))
