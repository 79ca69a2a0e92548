"""The blocks of a mirror, the names that one source of events has for them, and a copy of those held.

    name    engine hash -> block, and per (tier, attention group) stores less removals
    usable  a name is usable on a tier while every attention group that was ever stored there has a copy
    former  names that were removed lately (bounded): an engine may offload a block by its name alone, in the same batch
            in which it evicts it

Stores are counted because some engines store one block twice (two requests computed it at once) and remove it twice.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kv_protocol.digest import BUCKETS
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import HeldBlock

FORMER_NAMES_MAX = 16_384


class Namespace(NamedTuple):
    """The parts of a block's hash beside its tokens."""

    lora_name: str | None = None
    cache_salt: str | None = None


class MirrorBlock:
    """One block: its place in its sequence, the number of its names, and per tier the number of usable names."""

    __slots__ = ("names", "namespace", "parent", "position", "sequence_hash", "usable")

    def __init__(self, sequence_hash: int, parent: int | None, position: int, namespace: Namespace) -> None:
        self.sequence_hash = sequence_hash
        self.parent = parent
        self.position = position
        self.namespace = namespace
        self.names = 0
        self.usable = [0] * len(TIERS)


class EngineName:
    """One engine hash, while its source holds a copy by it."""

    __slots__ = ("block", "copies", "usable_bits")

    def __init__(self, block: MirrorBlock) -> None:
        self.block = block
        self.copies: dict[tuple[Tier, int], int] = {}
        self.usable_bits = 0

    def is_usable(self, tier: Tier) -> bool:
        """Return whether the block can be used from `tier` by this name."""
        return bool(self.usable_bits >> tier & 1)

    @property
    def usable_tiers(self) -> list[Tier]:
        """The tiers from which the block can be used by this name."""
        return [tier for tier in TIERS if self.is_usable(tier)]


class SourceNames:
    """The names of one source on one rank."""

    def __init__(self) -> None:
        self._names: dict[int, EngineName] = {}
        self._groups: defaultdict[Tier, set[int]] = defaultdict(set)
        self._former: OrderedDict[int, MirrorBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def get(self, engine_hash: int) -> EngineName | None:
        """Return what the hash names now."""
        return self._names.get(engine_hash)

    def meaning(self, engine_hash: int) -> MirrorBlock | None:
        """Return the block that the engine hash names, or named lately."""
        name = self._names.get(engine_hash)
        return self._former.get(engine_hash) if name is None else name.block

    def store(self, engine_hash: int, block: MirrorBlock, tier: Tier, group_idx: int) -> tuple[bool, bool]:
        """Count one copy in; return whether the name came to be usable on `tier`, and whether the copy is a second."""
        name = self._names.get(engine_hash)
        if name is None:
            name = self._names[engine_hash] = EngineName(block)
        groups, place = self._groups[tier], (tier, group_idx)
        groups.add(group_idx)
        count = name.copies.get(place, 0)
        name.copies[place] = count + 1
        became_usable = not name.is_usable(tier) and all((tier, group) in name.copies for group in groups)
        name.usable_bits |= became_usable << tier
        return became_usable, count > 0

    def remove(self, engine_hash: int, tier: Tier, group_idx: int) -> bool | None:
        """Count one copy out; return whether the name ceased to be usable on `tier`; None when there was no copy."""
        name, place = self._names.get(engine_hash), (tier, group_idx)
        if name is None or place not in name.copies:
            return None
        name.copies[place] -= 1
        if name.copies[place]:
            return False
        del name.copies[place]
        ceased = name.is_usable(tier)
        name.usable_bits &= ~(1 << tier)
        if not name.copies:
            self._give_up(engine_hash, name)
        return ceased

    def take(self, engine_hash: int) -> EngineName:
        """Remove and return an existing name."""
        name = self._names[engine_hash]
        self._give_up(engine_hash, name)
        return name

    def clear(self) -> list[EngineName]:
        """Remove and return all names."""
        names = list(self._names.values())
        self._names.clear()
        self._groups.clear()
        self._former.clear()
        return names

    def _give_up(self, engine_hash: int, name: EngineName) -> None:
        del self._names[engine_hash]
        self._former[engine_hash] = name.block
        self._former.move_to_end(engine_hash)
        if len(self._former) > FORMER_NAMES_MAX:
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
