"""Subjects measured in turns: the figures of every round, their medians, and medians of the ratios within rounds."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median


class Rounds:
    """The figures of every round, by subject and cell. A disturbance of the machine is in all subjects of a round."""

    def __init__(self) -> None:
        self.rounds: defaultdict[tuple[str, str], list[Mapping[str, float]]] = defaultdict(list)

    def add(self, subject: str, cell: str, found: Mapping[str, float]) -> None:
        """Add the figures of a round."""
        self.rounds[subject, cell].append(found)

    def of(self, subject: str, cell: str, name: str) -> list[float]:
        """Return a figure's value in every round in which it was measured."""
        return [each[name] for each in self.rounds.get((subject, cell), ()) if name in each]

    def figure(self, subject: str, cell: str, name: str) -> float | None:
        """Return the median of all rounds; None: not measured."""
        found = self.of(subject, cell, name)
        return float(median(found)) if found else None

    def ratio(self, cell: str, name: str, above: str, below: str) -> float | None:
        """Return the median over rounds of one subject's figure over another's; None: not measured."""
        pairs = zip(self.of(above, cell, name), self.of(below, cell, name), strict=False)
        found = [one / other for one, other in pairs if other]
        return float(median(found)) if found else None

    def cells(self, beginning: str = "") -> list[str]:
        """Return the names of cells that begin so and were measured, in order."""
        return list(dict.fromkeys(cell for _, cell in self.rounds if cell.startswith(beginning)))

    def plain(self) -> list[dict[str, object]]:
        """Return everything, to be written as JSON."""
        return [{"subject": subject, "cell": cell, "rounds": rounds} for (subject, cell), rounds in self.rounds.items()]
