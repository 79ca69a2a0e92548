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

from router.attribution.savings import Saving


class Sums:
    """What some requests saved together."""

    __slots__ = (
        "baseline_s", "baseline_tokens", "compared_requests", "evicted_blocks", "foregone_tokens", "learnt_s",
        "prompt_tokens", "reported_tokens", "requests", "reused_tokens", "saved_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.compared_requests = 0
        self.prompt_tokens = self.reused_tokens = self.reported_tokens = self.foregone_tokens = 0
        self.baseline_tokens = self.saved_s = self.learnt_s = self.baseline_s = self.evicted_blocks = 0.0

    def count(self, saving: Saving) -> None:
        """Add a request."""
        self.requests += 1
        self.compared_requests += saving.is_compared
        self.prompt_tokens += saving.prompt_tokens
        self.reused_tokens += saving.reused_tokens
        self.reported_tokens += saving.reported_tokens
        self.baseline_tokens += saving.baseline_tokens
        self.foregone_tokens += saving.foregone_tokens
        self.saved_s += saving.saved_s
        self.learnt_s += saving.learnt_s
        self.baseline_s += saving.baseline_s

    def add(self, other: "Sums") -> None:
        """Add all requests of `other`."""
        self.requests += other.requests
        self.compared_requests += other.compared_requests
        self.prompt_tokens += other.prompt_tokens
        self.reused_tokens += other.reused_tokens
        self.reported_tokens += other.reported_tokens
        self.baseline_tokens += other.baseline_tokens
        self.foregone_tokens += other.foregone_tokens
        self.saved_s += other.saved_s
        self.learnt_s += other.learnt_s
        self.baseline_s += other.baseline_s
        self.evicted_blocks += other.evicted_blocks


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
        self.other = Sums()

    def count(self, name: str, saving: Saving) -> None:
        """Add a request of the name."""
        (self._rows.get(name) or self._enter(name)).sums.count(saving)

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
            del self._rows[least.name]
        row = self._rows[name] = NamedRow(name, missed)
        return row

    def _least(self) -> NamedRow:
        least, fewest = None, 0
        for row in self._rows.values():
            requests = row.sums.requests + row.missed
            if least is None or requests < fewest:
                least, fewest = row, requests
        assert least is not None, "there is room for one row at least"
        return least

    @property
    def absent_max(self) -> int:
        """The most requests that a name without a row may have had."""
        return self._least().requests_max if len(self._rows) >= self._rows_max else 0

    def rows(self) -> list[NamedRow]:
        """Return the rows, those with most requests first; by name where equal."""
        return sorted(self._rows.values(), key=_order)


def _order(row: NamedRow) -> tuple[int, str]:
    return -row.sums.requests, row.name
