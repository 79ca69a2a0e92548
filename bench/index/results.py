"""The results of the index bench: every round of every cell, and their medians."""

from collections import defaultdict
from statistics import median
from typing import Any

from bench.index.plan import IndexCell

CPU, WALL = 0, 1
"""Indices into a time: CPU ns, wall ns, operations."""


class IndexResults:
    """All rounds of every cell, by seat."""

    def __init__(self) -> None:
        self.rounds: defaultdict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        """By group, name of the cell, and seat."""

    def add(self, cell: IndexCell, seat: str, found: dict[str, Any]) -> None:
        """Add the figures of a round."""
        self.rounds[cell.group, cell.name, seat].append(found)

    def figure(self, group: str, name: str, seat: str, section: str) -> float | None:
        """Return the median of all rounds: CPU ns of one operation, or a number that is no time; None: not measured."""
        found = self._found(group, name, seat, section)
        return float(median(map(per_operation, found))) if found else None

    def total(self, group: str, name: str, seat: str, section: str, clock: int = CPU) -> float | None:
        """Return the median of all rounds: ns of all operations of a round."""
        found = self._found(group, name, seat, section)
        return float(median(each[clock] for each in found)) if found else None

    def count(self, group: str, name: str, seat: str, section: str) -> int | None:
        """Return the sum of all rounds of a number of things."""
        found = self._found(group, name, seat, section)
        return sum(found) if found else None

    def operations(self, group: str, name: str, seat: str, section: str) -> int | None:
        """Return how many operations a round has."""
        found = self._found(group, name, seat, section)
        return int(found[0][2]) if found else None

    def cells(self, group: str) -> list[str]:
        """Return the names of a group's cells that were measured, in order."""
        return list(dict.fromkeys(name for of, name, _ in self.rounds if of == group))

    def sections(self, group: str, name: str) -> list[str]:
        """Return the names of all figures of a cell, of any seat, in order."""
        mine = [rounds for (of, which, _), rounds in self.rounds.items() if (of, which) == (group, name)]
        return list(dict.fromkeys(section for rounds in mine for found in rounds for section in found))

    def ratio(self, group: str, name: str, section: str, seats: tuple[str, str]) -> float | None:
        """Return the one seat's figure over the other's; None where one is missing, or nothing."""
        above, below = (self.figure(group, name, seat, section) for seat in seats)
        return above / below if above and below else None

    def _found(self, group: str, name: str, seat: str, section: str) -> list[Any]:
        return [each[section] for each in self.rounds.get((group, name, seat), ()) if section in each]


def per_operation(found: Any) -> float:  # noqa: ANN401 - as it came
    """Return CPU ns of one operation of (CPU ns, wall ns, operations), or a number as it is."""
    return float(found[0] / found[2] if isinstance(found, list) else found)
