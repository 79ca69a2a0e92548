"""The targets of the data plane, and whether they are reached.

CPU, of small and 40 KB   mode kv: 0.5 and 0.6 of the best cache-aware peer's. With a model's tokenizer, which that peer
requests, saturated       does without: 1.0 and 1.5 of it, and 0.25 and 0.35 of Dynamo's. Round robin: 0.65 of the best
                          peer's in round robin
a stream of 8 chunks      0.8 of the best peer's CPU in round robin
a streamed chunk          0.7 of the best peer's CPU in bursts, 1.0 at a high rate
latency added             at a modest rate, p50: at most the best peer's
a slow reader             less than 1 MiB
a client that leaves      its stream is cut off within 5 ms
streams at once           all open at one moment, all complete, without an error
tracing on                no request sampled: at most 5 us of CPU a small request more than without (of runs with it)
control                   no added latency is negative, and no proxy costs less than nginx

The best peer is the one with the lowest value in that cell, with any of its policies where none is named. A ratio is
the median over the ratios of each round.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from bench.dataplane.run import (
    BURST,
    CRAWLED,
    HELD,
    HIGH_RATE,
    LARGE,
    LEFT,
    PACED,
    SMALL,
    STREAM,
    DataplaneResults,
)
from bench.dataplane.systems import (
    CACHE,
    DIRECT,
    DYNAMO,
    KV,
    NGINX,
    OURS,
    PEERS,
    ROUND_ROBIN,
    UNSAMPLED,
    SystemPlan,
)

PLAIN = SystemPlan(OURS, ROUND_ROBIN).name
AWARE = SystemPlan(OURS, KV).name
TOKENIZING = SystemPlan(OURS, KV, text="a model").name
_CPU_TARGETS = (
    (AWARE, CACHE, {SMALL: 0.5, LARGE: 0.6}),
    (TOKENIZING, CACHE, {SMALL: 1.0, LARGE: 1.5}),
    (TOKENIZING, DYNAMO, {SMALL: 0.25, LARGE: 0.35}),
    (PLAIN, ROUND_ROBIN, {SMALL: 0.65, LARGE: 0.65, STREAM: 0.8}),
    (PLAIN, None, {BURST: 0.7, HIGH_RATE: 1.0}),
)
"""Ours, the peers it is compared with (of a policy, Dynamo, or all), and at most how much of their CPU it takes."""
_TITLES = {
    SMALL: "a small request",
    LARGE: "a request of 40 KB",
    STREAM: "a stream of 8 chunks",
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


def best_peer(results: DataplaneResults, cell: str, of: str | None = None) -> str | None:
    """Return the peer with the least CPU in a cell; None: none was measured.

    `of`: a policy of peers, or Dynamo, which is compared with alone; None: every peer but Dynamo.
    """
    if of == DYNAMO:
        peers = [plan for plan in results.systems if plan.kind == DYNAMO]
    else:
        peers = [plan for plan in _peers(results) if of in (None, plan.policy)]
    found = [(cpu_us, plan.name) for plan in peers if (cpu_us := results.figure(plan.name, cell, "cpu_us")) is not None]
    return min(found)[1] if found else None


def ratio(results: DataplaneResults, system: str, cell: str, other: str | None) -> float | None:
    """Return the median over rounds of a system's CPU in a cell over another's."""
    if other is None:
        return None
    pairs = zip(results.rounds.get((system, cell), ()), results.rounds.get((other, cell), ()), strict=False)
    found = [own["cpu_us"] / its["cpu_us"] for own, its in pairs if "cpu_us" in own and its.get("cpu_us")]
    return median(found) if found else None


def verdicts(results: DataplaneResults) -> list[DataplaneVerdict]:
    """Return the verdict on every target."""
    return [*_cpu(results), _added(results), *_once(results), *_tracing(results), *_control(results)]


def _cpu(results: DataplaneResults) -> Iterator[DataplaneVerdict]:
    for ours, of, most in _CPU_TARGETS:
        peers = "Dynamo's" if of == DYNAMO else f"the best peer's{f', {of}' if of else ''}"
        for cell, needed in most.items():
            best = best_peer(results, cell, of)
            target = f"CPU of {_TITLES[cell]} ({ours}), over {peers}"
            told = f"against {best}" if best else "no peer"
            yield DataplaneVerdict(target, "<=", needed, "x", ratio(results, ours, cell, best), told)


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
    least = [each for name in proxies if name != NGINX and (each := ratio(results, name, SMALL, NGINX)) is not None]
    target = "control: CPU of a small request, the least of all proxies over nginx's"
    yield DataplaneVerdict(target, ">=", 1 / _NOISE, "x", min(least, default=None))


def _peers(results: DataplaneResults) -> Sequence[SystemPlan]:
    return [plan for plan in results.systems if plan.kind in PEERS]
