"""Ranks for which the index had no memory, and when to ask for their dump again.

    found                                  what is waited for
    ------------------------------------   ----------------------------------------------------------------------
    overfull                               memory at 0.9 of the limit, or nodes below 0.9 of those that there were
    overfull still, after its dump         memory at, or nodes below 0.9 of what there was then
    not overfull any more                  nothing: all of its blocks are there

Nodes count because an index may keep the memory of blocks that are gone for blocks to come. The second row brings
asking to an end: each dump in vain takes another fall by a tenth, also where an index refuses blocks long before the
limit. Without a limit, what is in use when the rank is found overfull stands for it.
"""

from typing import NamedTuple

from indexer.index.prefix_index import PrefixIndex

HEALED_RATIO = 0.9


class _Fill(NamedTuple):
    memory_bytes: int
    nodes: int

    def is_fall_from(self, full: "_Fill") -> bool:
        return self.memory_bytes <= HEALED_RATIO * full.memory_bytes or self.nodes < HEALED_RATIO * full.nodes


class OverfullRanks:
    """The overfull ranks of one index, by their number (slot) in it."""

    def __init__(self, index: PrefixIndex, memory_bytes_max: int) -> None:
        self._index, self._limit_bytes = index, memory_bytes_max
        self._full_at: dict[int, _Fill] = {}

    def look(self) -> set[int]:
        """Take note of all ranks that are overfull now; return them."""
        found = self._index.overfull()
        for slot in self._full_at.keys() - found:
            del self._full_at[slot]
        for slot in found - self._full_at.keys():
            self._note(slot)
        return found

    def noted(self) -> set[int]:
        """Return the ranks that were found to be overfull, without looking again."""
        return set(self._full_at)

    def is_overfull(self, slot: int) -> bool:
        """Take note of whether one rank is overfull, and return it; what is known to be is not looked at again."""
        if slot not in self._full_at and slot in self._index.overfull():
            self._note(slot)
        return slot in self._full_at

    def is_overfull_after_dump(self, slot: int) -> bool:
        """The rank's blocks were loaded anew; return whether it is overfull still."""
        if slot in self._index.overfull():
            self._full_at[slot] = self._fill()
        else:
            self._full_at.pop(slot, None)
        return slot in self._full_at

    def forget(self, slot: int) -> None:
        """The rank was dropped from the index."""
        self._full_at.pop(slot, None)

    def worth_asking(self) -> list[int]:
        """Return the overfull ranks, in ascending order, for whose blocks there may be room again."""
        if not self._full_at:
            return []
        now = self._fill()
        return sorted(slot for slot, full in self._full_at.items() if now.is_fall_from(full))

    def _note(self, slot: int) -> None:
        now = self._fill()
        self._full_at[slot] = now._replace(memory_bytes=self._limit_bytes or now.memory_bytes)

    def _fill(self) -> _Fill:
        statistics = self._index.statistics()
        return _Fill(statistics.memory_bytes, statistics.nodes)
