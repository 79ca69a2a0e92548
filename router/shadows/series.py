"""The mean of a series and its standard error, in constant memory. Pure.

The standard error is that of batch means: requests that follow each other are alike (a busy moment, one session), so
single values would make it too small. A long series has `BATCHES` to `2 * BATCHES` batches of equal length; at
`2 * BATCHES` each two become one.
"""

import math
from collections.abc import Sequence

import msgspec

BATCHES = 32
T_95 = 2.04
"""The 97.5 % quantile of Student's t with 31 degrees of freedom; with more batches it would be smaller."""


class SeriesMean(msgspec.Struct, frozen=True):
    """The mean of `count` values, and its standard error; None: too few values."""

    count: int
    mean: float
    standard_error: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the 95 % confidence interval; None: too few values."""
        if self.standard_error is None:
            return None
        return self.mean - T_95 * self.standard_error, self.mean + T_95 * self.standard_error


class Series:
    """A growing series of values."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self._batches: list[float] = []
        self._length, self._open, self._sum = 1, 0, 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.total += value
        self._open += 1
        self._sum += value
        if self._open == self._length:
            self._batches.append(self._sum)
            self._open, self._sum = 0, 0.0
            if len(self._batches) == 2 * BATCHES:
                pairs = zip(self._batches[::2], self._batches[1::2], strict=True)
                self._batches = [one + other for one, other in pairs]
                self._length *= 2

    def mean(self) -> SeriesMean:
        """Return the mean and its standard error; without values the mean is 0."""
        return SeriesMean(self.count, self.total / max(1, self.count), self._standard_error())

    def _standard_error(self) -> float | None:
        count = len(self._batches)
        if count < BATCHES:
            return None
        means = [each / self._length for each in self._batches]
        middle = math.fsum(means) / count
        variance = math.fsum((each - middle) ** 2 for each in means) / (count - 1)
        return math.sqrt(variance / count)


def pooled(means: Sequence[SeriesMean]) -> SeriesMean:
    """Return the mean of several independent series together: one of each process of a router."""
    known = [each for each in means if each.count]
    count = sum(each.count for each in known)
    if not count:
        return SeriesMean(0, 0.0, None)
    errors = [each.standard_error for each in known]
    variance = sum((each.count / count) ** 2 * (error or 0.0) ** 2 for each, error in zip(known, errors, strict=True))
    is_known = all(error is not None for error in errors)
    mean = sum(each.mean * each.count for each in known) / count
    return SeriesMean(count, mean, math.sqrt(variance) if is_known else None)
