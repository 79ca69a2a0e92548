"""Waiting in a group of equal servers, from utilisation. Pure.

    prompts       Poisson arrivals, general service times, k servers, one line (M/G/k), approximated by
                  P(wait > t) = C(k, a) * exp(-t / m),  m = E[S] (1 + c^2) / (2 k (1 - a / k))
                  C: Erlang's delay formula, a: offered work in servers, c: coefficient of variation of S.
                  Source: Lee and Longton 1959, and Whitt, "Approximations for the GI/G/m queue", Production and
                  Operations Management 2 (1993), 2.1 and 2.4: the wait of M/M/k times (1 + c^2) / 2, and an exponential
                  tail.
    sequences     all of a rank's are served at once: as in M/G/infinity their number is Poisson.
                  Source: Kleinrock, "Queueing Systems", volume 1, 3.4.

One line means that a request goes to the rank that is free first. A router that prefers the rank with the longest
prefix makes some requests wait longer: the shares are upper bounds.
"""

import math
from typing import NamedTuple

_SPREADS = 10.0
"""Standard deviations of a Poisson number beyond which its share is 0 or 1."""


class ServiceTimes(NamedTuple):
    """Seconds of service and how many requests need them, in order."""

    times: tuple[tuple[float, int], ...]

    @property
    def mean_s(self) -> float:
        """The mean; 0 without requests."""
        count = sum(count for _, count in self.times)
        return sum(seconds * count for seconds, count in self.times) / count if count else 0.0

    @property
    def variation_squared(self) -> float:
        """Variance / mean^2; 0 if nothing takes time."""
        mean, count = self.mean_s, sum(count for _, count in self.times)
        return sum(count * (seconds - mean) ** 2 for seconds, count in self.times) / count / mean**2 if mean else 0.0


def delayed_share(servers: int, offered: float) -> float:
    """Return Erlang's C: the share of requests that wait when `offered` servers are busy on average; 1 if too few."""
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for each in range(1, servers + 1):
        blocked = offered * blocked / (each + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


def begun_and_served_within(times: ServiceTimes, servers: int, rate_per_s: float, within_s: float) -> float:
    """Return the share of requests whose wait and service end within so many seconds; 0 if they are too many."""
    mean_s, count = times.mean_s, sum(count for _, count in times.times)
    offered = rate_per_s * mean_s
    if offered >= servers:
        return 0.0
    delayed = delayed_share(servers, offered)
    mean_wait_s = mean_s * (1.0 + times.variation_squared) / (2.0 * (servers - offered))
    share = 0.0
    for seconds, of_these in times.times:
        left_s = within_s - seconds
        if left_s >= 0.0:
            late = delayed * math.exp(-left_s / mean_wait_s) if mean_wait_s else 0.0
            share += of_these / count * (1.0 - late)
    return share


def poisson_at_most(mean: float, most: int) -> float:
    """Return the probability that a Poisson number with this mean is `most` or less."""
    spread = _SPREADS * math.sqrt(mean) + _SPREADS
    if most < 0 or mean > most + spread:
        return 0.0
    if mean <= 0.0 or most > mean + spread:
        return 1.0
    logarithm = math.log(mean)
    return min(1.0, sum(math.exp(n * logarithm - mean - math.lgamma(n + 1)) for n in range(most + 1)))
