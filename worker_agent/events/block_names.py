"""The names that one source of events has for the blocks it holds, with their counts.

    name    engine hash -> our sequence hash, and per (tier, attention group) stores less removals
    usable  a name is usable on a tier while every attention group that was ever stored there has a copy
    former  names that were removed lately (bounded): an engine may offload a block by its name alone, in the same batch
            in which it evicts it

Stores are counted because some engines store one block twice (two requests computed it at once) and remove it twice.
"""

from collections import OrderedDict, defaultdict

from kv_protocol.events import TIERS, Tier

FORMER_NAMES_MAX = 16_384


class EngineName:
    """One engine hash, while its source holds a copy by it."""

    __slots__ = ("copies", "sequence_hash", "usable_bits")

    def __init__(self, sequence_hash: int) -> None:
        self.sequence_hash = sequence_hash
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
        self._former: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def get(self, engine_hash: int) -> EngineName | None:
        """Return what the hash names now."""
        return self._names.get(engine_hash)

    def meaning(self, engine_hash: int) -> int | None:
        """Return the sequence hash that the engine hash names, or named lately."""
        name = self._names.get(engine_hash)
        return self._former.get(engine_hash) if name is None else name.sequence_hash

    def store(self, engine_hash: int, sequence_hash: int, tier: Tier, group_idx: int) -> tuple[bool, bool]:
        """Count one copy in; return whether the name came to be usable on `tier`, and whether the copy is a second."""
        name = self._names.get(engine_hash)
        if name is None:
            name = self._names[engine_hash] = EngineName(sequence_hash)
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
        self._former[engine_hash] = name.sequence_hash
        self._former.move_to_end(engine_hash)
        if len(self._former) > FORMER_NAMES_MAX:
            self._former.popitem(last=False)
