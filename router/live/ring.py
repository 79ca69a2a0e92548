"""A bounded memory of moments: one sample in `RECENT_STEP_S` of late, one in `OLD_STEP_S` of what is older.

    recent    the last `RECENT_S`, every sample that was added
    old       up to `OLD_S`, thinned
    full      beyond `bytes_max` the oldest samples are dropped

A clock that is set back ends the samples that are later than it.
"""

from bisect import bisect_right
from collections import deque
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

RECENT_STEP_S, RECENT_S = 5.0, 1800.0
OLD_STEP_S, OLD_S = 60.0, 43_200.0


class Sample(NamedTuple):
    """What was kept of a moment (Unix time)."""

    at_s: float
    data: bytes


class Ring:
    """The samples, in the order of time."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._recent: deque[Sample] = deque()
        self._old: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._old) + len(self._recent)

    def add(self, at_s: float, data: bytes) -> None:
        """Keep a sample; thin and drop others, so that all are within the bounds."""
        for samples in (self._recent, self._old):
            while samples and samples[-1].at_s >= at_s:
                self._forget(samples.pop())
        self._recent.append(Sample(at_s, data))
        self.bytes += len(data)
        while self._recent[0].at_s <= at_s - RECENT_S:
            self._thin(self._recent.popleft())
        while self._old and (self._old[0].at_s <= at_s - OLD_S or self.bytes > self.bytes_max):
            self._forget(self._old.popleft())
        while self._recent and self.bytes > self.bytes_max:
            self._forget(self._recent.popleft())

    def _thin(self, sample: Sample) -> None:
        if not self._old or sample.at_s >= self._old[-1].at_s + OLD_STEP_S:
            self._old.append(sample)
        else:
            self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        self.bytes -= len(sample.data)

    def at(self, at_s: float) -> Sample | None:
        """Return the last sample of that time or earlier; None if all are later."""
        for samples in (self._recent, self._old):
            if samples and samples[0].at_s <= at_s:
                return samples[bisect_right(samples, at_s, key=attrgetter("at_s")) - 1]
        return None

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of the first and of the last sample; None without any."""
        if not self._recent:
            return None
        return next(chain(self._old, self._recent)).at_s, self._recent[-1].at_s

    def steps(self) -> list[tuple[float, float]]:
        """Return how far apart samples are, and since when, for each part that has any."""
        parts = ((RECENT_STEP_S, self._recent), (OLD_STEP_S, self._old))
        return [(step_s, samples[0].at_s) for step_s, samples in parts if samples]
