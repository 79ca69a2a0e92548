"""The targets of the data plane, and whether they are reached. Source: `docs/PERFORMANCE.md`.

a request, small or of 40 KB, saturated   round robin: at most the CPU of the best peer in round robin; mode kv: at most
                                          that of the best cache-aware peer
a streamed chunk                          at most the best peer's CPU, in bursts and at a high rate
latency added at a modest rate, p50       at most the best peer's
a reader that does not read               less than 1 MB
a client that leaves                      its stream is cut off within 5 ms
streams at once                           all open at one moment, all complete, without an error
tracing on, no request sampled            at most 5 us of CPU a small request more than without (of runs with it)
control                                   no added latency is negative, and no proxy costs less than nginx

The best peer is the one with the lowest value in that cell, with any of its policies where none is named.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from bench.dataplane.run import BURST, CRAWLED, HELD, HIGH_RATE, LARGE, LEFT, PACED, SMALL, DataplaneResults
from bench.dataplane.systems import CACHE, DIRECT, KV, NGINX, OURS, PEERS, ROUND_ROBIN, UNSAMPLED, SystemPlan

PLAIN = SystemPlan(OURS, ROUND_ROBIN).name
AWARE = SystemPlan(OURS, KV).name
_OF_KIND = ((PLAIN, ROUND_ROBIN), (AWARE, CACHE))
"""Ours, and the policy of the peers that it is compared with."""
_TITLES = {
    SMALL: "a small request",
    LARGE: "a request of 40 KB",
    BURST: "a chunk in bursts",
    HIGH_RATE: "a chunk, high rate",
}
_NOISE = 1.1


class DataplaneVerdict(NamedTuple):
    """One target: `sign` `needed`, and the measured value; None: not measured."""

    target: str
    sign: str
    needed: float
    unit: str
    measured: float | None
    told: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached; None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured <= self.needed if self.sign == "<=" else self.measured >= self.needed


def added_us(results: DataplaneResults, system: str, quantile: str) -> float | None:
    """Return the median over rounds of a system's latency at the modest rate less that of the same round without it."""
    pairs = zip(results.rounds.get((system, PACED), ()), results.rounds.get((DIRECT, PACED), ()), strict=False)
    found = sorted(proxied[quantile] - direct[quantile] for proxied, direct in pairs)
    return found[len(found) // 2] if found else None


def best_peer(results: DataplaneResults, cell: str, policy: str | None = None) -> tuple[str, float] | None:
    """Return the peer with the least CPU in a cell, of those with this policy, and that; None: none was measured."""
    peers = [plan for plan in _peers(results) if policy in (None, plan.policy)]
    found = [(plan.name, results.figure(plan.name, cell, "cpu_us")) for plan in peers]
    return min(((name, cpu_us) for name, cpu_us in found if cpu_us is not None), key=lambda each: each[1], default=None)


def ratio(results: DataplaneResults, system: str, cell: str, other: float | None) -> float | None:
    """Return a system's CPU in a cell over another's."""
    cpu_us = results.figure(system, cell, "cpu_us")
    return cpu_us / other if cpu_us is not None and other else None


def verdicts(results: DataplaneResults) -> list[DataplaneVerdict]:
    """Return the verdict on every target."""
    return [*_cpu(results), _added(results), *_once(results), *_tracing(results), *_control(results)]


def _cpu(results: DataplaneResults) -> Iterator[DataplaneVerdict]:
    for cell in (SMALL, LARGE):
        for ours, policy in _OF_KIND:
            target = f"CPU of {_TITLES[cell]} ({ours}), over the best peer's, {policy}"
            yield _beside(results, ours, cell, target, best_peer(results, cell, policy))
    for cell in (BURST, HIGH_RATE):
        yield _beside(results, PLAIN, cell, f"CPU of {_TITLES[cell]}, over the best peer's", best_peer(results, cell))


def _beside(
    results: DataplaneResults, ours: str, cell: str, target: str, best: tuple[str, float] | None
) -> DataplaneVerdict:
    measured = ratio(results, ours, cell, best[1] if best else None)
    return DataplaneVerdict(target, "<=", 1.0, "x", measured, f"against {best[0]}" if best else "no peer")


def _added(results: DataplaneResults) -> DataplaneVerdict:
    found = [(plan.name, added_us(results, plan.name, "p50_us")) for plan in _peers(results)]
    best = min(((name, us) for name, us in found if us is not None), key=lambda each: each[1], default=None)
    ours, target = added_us(results, PLAIN, "p50_us"), "latency added at a modest rate, p50, over the best peer's"
    if best is None or ours is None:
        return DataplaneVerdict(target, "<=", 1.0, "x", None, "no peer" if best is None else f"against {best[0]}")
    return DataplaneVerdict(target, "<=", 1.0, "x", ours / best[1] if best[1] > 0 else None, f"against {best[0]}")


def _once(results: DataplaneResults) -> Iterator[DataplaneVerdict]:
    for system in (PLAIN, AWARE):
        more_mib = results.figure(system, CRAWLED, "rss_more_mib")
        yield DataplaneVerdict(f"memory for a reader that does not read ({system})", "<=", 1.0, " MiB", more_mib)
        worst, unseen = (results.figure(system, LEFT, name) for name in ("worst_ms", "unseen"))
        note = f"{unseen:.0f} never" if unseen else ""
        yield DataplaneVerdict(
            f"a client that leaves, at worst ({system})", "<=", 5.0, " ms", None if unseen else worst, note
        )
        failed = [results.figure(system, HELD, name) for name in ("errors", "missing")]
        held, lost = results.figure(system, HELD, "streams") or 0.0, max((each or 0.0 for each in failed), default=0.0)
        yield DataplaneVerdict(
            f"streams open at once ({system})", ">=", held, "", results.figure(system, HELD, "at_once")
        )
        yield DataplaneVerdict(f"of them failed, or chunks missing ({system})", "<=", 0.0, "", lost if held else None)


def _tracing(results: DataplaneResults) -> Iterator[DataplaneVerdict]:
    if UNSAMPLED in results.systems:
        pairs = zip(results.rounds[AWARE, SMALL], results.rounds[UNSAMPLED.name, SMALL], strict=True)
        more_us = median(traced["cpu_us"] - plain["cpu_us"] for plain, traced in pairs)
        yield DataplaneVerdict("CPU that tracing adds to a small request, unsampled", "<=", 5.0, " us", more_us)


def _control(results: DataplaneResults) -> Iterator[DataplaneVerdict]:
    proxies = [plan.name for plan in results.systems if plan.kind != DIRECT]
    added = [us for name in proxies if (us := added_us(results, name, "p50_us")) is not None]
    yield DataplaneVerdict("control: the least latency that a proxy adds", ">=", 0.0, " us", min(added, default=None))
    floor = results.figure(NGINX, SMALL, "cpu_us")
    least = [each for name in proxies if name != NGINX and (each := ratio(results, name, SMALL, floor)) is not None]
    target = "control: CPU of a small request, the least of all proxies over nginx's"
    yield DataplaneVerdict(target, ">=", 1 / _NOISE, "x", min(least, default=None))


def _peers(results: DataplaneResults) -> Sequence[SystemPlan]:
    return [plan for plan in results.systems if plan.kind in PEERS]
