"""Sums by name for the names with most requests, in bounded memory: the space-saving sketch. Pure.

    known name         its row gets the request
    new, room left     a row
    new, no room       the row with the smallest `requests + missed` is added to `other`; the new name's row begins at
                       0, with that number as its `missed`

So for every name, with N requests in all and K rows:

    rows and `other` add up to everything, exactly
    a row has at least what the name had since the row began; requests <= the name's requests <= requests + missed
    missed <= N / K for every row, and a name without a row had at most `absent_max` <= N / K requests

Source: Metwally, Agrawal, El Abbadi, "Efficient computation of frequent and top-k elements in data streams", 2005.
"""

from heapq import heappop, heappush, heapreplace

from router.attribution.savings import Sums


class NamedRow:
    """One name's sums since its row began; before, the name had `missed` requests at most."""

    __slots__ = ("missed", "name", "sums")

    def __init__(self, name: str, missed: int) -> None:
        self.name, self.missed = name, missed
        self.sums = Sums()

    @property
    def requests_max(self) -> int:
        """The most requests that the name may have had."""
        return self.sums.requests + self.missed


class TopRows:
    """At most `rows_max` rows, and the sum of all else."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._rows: dict[str, NamedRow] = {}
        self._fewest: list[tuple[int, int, NamedRow]] = []
        """A heap: `requests_max` of a row when it was placed here (it only grows), the row's number, the row."""
        self._entered = 0
        self.other = Sums()

    def count(self, name: str, saving: Sums) -> None:
        """Add what a request of the name saved."""
        (self._rows.get(name) or self._enter(name)).sums.add(saving)

    def charge(self, name: str, blocks: float) -> None:
        """Add evicted blocks to a name that had a request."""
        row = self._rows.get(name)
        (self.other if row is None else row.sums).evicted_blocks += blocks

    def _enter(self, name: str) -> NamedRow:
        missed = 0
        if len(self._rows) >= self._rows_max:
            least = self._least()
            missed = least.requests_max
            self.other.add(least.sums)
            heappop(self._fewest)
            del self._rows[least.name]
        row = self._rows[name] = NamedRow(name, missed)
        self._entered += 1
        heappush(self._fewest, (missed, self._entered, row))
        return row

    def _least(self) -> NamedRow:
        """Return the row with the smallest `requests_max`, the oldest if several; it is then at the top of the heap."""
        while True:
            placed, number, row = self._fewest[0]
            requests = row.requests_max
            if requests == placed:
                return row
            heapreplace(self._fewest, (requests, number, row))

    @property
    def absent_max(self) -> int:
        """The most requests that a name without a row may have had."""
        return self._least().requests_max if len(self._rows) >= self._rows_max else 0

    def rows(self) -> list[NamedRow]:
        """Return the rows, those with most requests first; by name where equal."""
        return sorted(self._rows.values(), key=_order)


def _order(row: NamedRow) -> tuple[int, str]:
    return -row.sums.requests, row.name
