"""The order of a rank's blocks in dumps and recovery answers."""

from collections.abc import Iterator, Mapping


def parents_first(parents: Mapping[int, int | None]) -> Iterator[int]:
    """Yield every key of `parents` (block -> its parent), each after its parent if that is a key too. O(n)."""
    seen: set[int] = set()
    for block in parents:
        chain: list[int] = []
        at: int | None = block
        while at is not None and at in parents and at not in seen:
            seen.add(at)
            chain.append(at)
            at = parents[at]
        yield from reversed(chain)
