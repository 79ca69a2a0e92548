"""How long it took to be right again after each fault, as a table."""

from pathlib import Path
from typing import NamedTuple

from tests.system.faults.traffic import Traffic

_HEAD = (
    "| fault | recovered in s | bound, s | requests answered | that waited | failed |\n|---|---:|---:|---:|---:|---:|\n"
)


class Recovery(NamedTuple):
    """One fault: from the moment at which its cause was gone until every index was proven right."""

    fault: str
    recovered_s: float
    bound_s: float
    answered: int
    waited: int
    failed: int

    @property
    def line(self) -> str:
        return f"recovery {self.fault} {self.recovered_s:.1f}"

    @property
    def row(self) -> str:
        return (
            f"| {self.fault} | {self.recovered_s:.1f} | {self.bound_s:g} "
            f"| {self.answered} | {self.waited} | {self.failed} |\n"
        )


class Recoveries:
    """Those of a whole run."""

    def __init__(self) -> None:
        self._all: list[Recovery] = []
        self._told: list[str] = []

    def add(self, fault: str, recovered_s: float, bound_s: float, sent: Traffic) -> None:
        """`fault` was healed, as `recovered_s` says."""
        self._all.append(Recovery(fault, recovered_s, bound_s, sent.answered, sent.waited, len(sent.failed)))

    def tell(self, line: str) -> None:
        """A test found out something that is no recovery of an index."""
        self._told.append(line)

    def lines(self) -> list[str]:
        """Return a line for each, for people who wait."""
        return [each.line for each in self._all] + self._told

    def write(self, file: Path) -> None:
        """The table is in `file`."""
        file.parent.mkdir(parents=True, exist_ok=True)
        told = "".join(f"\n{line}\n" for line in self._told)
        file.write_text(_HEAD + "".join(each.row for each in self._all) + told, encoding="utf-8")
