"""Chains of sequence hashes.

A sequence hash names its block and all before it, so chains that agree at one place agree up to it.
"""

from collections.abc import Sequence


def shared_blocks(chain: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """Return how many leading blocks of `chain` are those of `other` from `start` on; O(log of their length)."""
    low, high = 0, min(len(chain), len(other) - start)
    while low < high:
        middle = (low + high) // 2
        if chain[middle] == other[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
