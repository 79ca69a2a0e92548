"""A copy of the blocks that a rank holds at one moment, independent of later changes of the mirror.

Construction copies two dictionaries (20 ms for a million blocks); iteration puts the blocks in order.
"""

from collections.abc import Iterator, Mapping

from kv_protocol.digest import BUCKETS
from kv_protocol.recovery import HeldBlock
from worker_agent.events.mirror_blocks import MirrorBlock


class HeldBlocks:
    """The blocks of a set of buckets, or all if it is empty; iterating yields rows, parents first."""

    def __init__(self, tier_bits: Mapping[int, int], blocks: Mapping[int, MirrorBlock], buckets: bytes) -> None:
        self._buckets = buckets
        self._tier_bits = dict(tier_bits) if not buckets else _of_buckets(tier_bits, buckets)
        self._blocks = dict(blocks) if not buckets else {each: blocks[each] for each in self._tier_bits}

    def __len__(self) -> int:
        return len(self._tier_bits)

    def __iter__(self) -> Iterator[HeldBlock]:
        tier_bits, blocks = self._tier_bits, self._blocks
        visited = set[int]()
        for block in tier_bits:
            chain = list[int]()
            at: int | None = block
            while at is not None and at in tier_bits and at not in visited:
                visited.add(at)
                chain.append(at)
                at = blocks[at].parent
            for each in reversed(chain):
                yield HeldBlock(each, blocks[each].parent, tier_bits[each])


def _of_buckets(tier_bits: Mapping[int, int], buckets: bytes) -> dict[int, int]:
    is_requested = [bool(buckets[bucket >> 3] >> (bucket & 7) & 1) for bucket in range(BUCKETS)]
    return {block: bits for block, bits in tier_bits.items() if is_requested[block >> 56]}
