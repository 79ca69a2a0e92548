"""The blocks of a mirror: those that a source has a name for, those that lately had one, and a copy of those held.

live      has at least one name; held on a tier while one of its names is usable there
former    its last name was removed; remembered (bounded), because an engine may store it again by its bare name
revived   a former block becomes live again if its parent is live, or if it has none: a block below a gap is useless
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kv_protocol.digest import BUCKETS
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock

FORMER_BLOCKS_MAX = 16_384


class Namespace(NamedTuple):
    """The parts of a block's hash beside its tokens."""

    lora_name: str | None = None
    cache_salt: str | None = None


class MirrorBlock:
    """One block: its position, the number of its names, and per tier the number of usable names."""

    __slots__ = ("names", "namespace", "parent", "position", "usable")

    def __init__(self, parent: int | None, position: int, namespace: Namespace) -> None:
        self.parent = parent
        self.position = position
        self.namespace = namespace
        self.names = 0
        self.usable = [0] * len(TIERS)


class MirrorBlocks(dict[int, MirrorBlock]):
    """The live blocks by sequence hash."""

    def __init__(self) -> None:
        super().__init__()
        self._former: OrderedDict[int, MirrorBlock] = OrderedDict()

    def position(self, sequence_hash: int) -> int:
        """Return the position of a live or former block in its sequence; 0 for any other."""
        block = self.get(sequence_hash) or self._former.get(sequence_hash)
        return 0 if block is None else block.position

    def live_again(self, sequence_hash: int) -> bool:
        """Revive a former block if possible; return whether the block is live."""
        former = self._former.get(sequence_hash)
        if former is not None and sequence_hash not in self and (former.parent is None or former.parent in self):
            self[sequence_hash] = MirrorBlock(former.parent, former.position, former.namespace)
        return sequence_hash in self

    def unname(self, sequence_hash: int) -> None:
        """Note that one name of a live block was removed."""
        block = self[sequence_hash]
        block.names -= 1
        if not block.names:
            self._former[sequence_hash] = self.pop(sequence_hash)
            self._former.move_to_end(sequence_hash)
            if len(self._former) > FORMER_BLOCKS_MAX:
                self._former.popitem(last=False)


class HeldBlocks:
    """The blocks of a set of buckets, or all if it is empty; iterating yields rows, parents first."""

    def __init__(self, tier_bits: Mapping[int, int], blocks: Mapping[int, MirrorBlock], buckets: bytes) -> None:
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
