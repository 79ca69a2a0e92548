"""Ranks with blocks for which the index had no memory, and when to request their dump again.

    found                                  the dump is requested when
    ------------------------------------   ----------------------------------------------------------------------
    overfull                               memory is at 0.9 of the limit, or nodes below 0.9 of those at the time
    overfull still, after its dump         memory is at, or nodes are below 0.9 of those after the dump
    not overfull any more                  never: all of its blocks are in the index

Nodes count because an index may keep the memory of removed blocks for later ones. The second row bounds the number of
dumps: after each dump in vain, memory or nodes have to fall by another tenth, also if an index refuses blocks long
before the limit. Without a limit, the memory in use when the rank became overfull is taken as the limit.
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
    """The overfull ranks of one index, by slot."""

    def __init__(self, index: PrefixIndex, memory_bytes_max: int) -> None:
        self._index, self._limit_bytes = index, memory_bytes_max
        self._full_at: dict[int, _Fill] = {}

    def refresh(self) -> set[int]:
        """Update from the index; return all overfull ranks."""
        found = self._index.overfull()
        for slot in self._full_at.keys() - found:
            del self._full_at[slot]
        for slot in found - self._full_at.keys():
            self._note(slot)
        return found

    def known(self) -> set[int]:
        """Return the overfull ranks as of the last check of each."""
        return set(self._full_at)

    def is_overfull(self, slot: int) -> bool:
        """Return whether one rank is overfull; the index is not asked again for a known one."""
        if slot not in self._full_at and slot in self._index.overfull():
            self._note(slot)
        return slot in self._full_at

    def is_overfull_after_dump(self, slot: int) -> bool:
        """The rank's dump was loaded; return whether the rank is still overfull."""
        if slot in self._index.overfull():
            self._full_at[slot] = self._fill()
        else:
            self._full_at.pop(slot, None)
        return slot in self._full_at

    def forget(self, slot: int) -> None:
        """The rank was dropped from the index."""
        self._full_at.pop(slot, None)

    def due_for_dump(self) -> list[int]:
        """Return, in ascending order, the overfull ranks for which there may be memory again."""
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
