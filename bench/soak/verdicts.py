"""The faults of a soak; figures of processes, from the operating system and /metrics; and the problems that they show.

Faults come by the count of requests, not by time:

| fault | is |
|---|---|
| worker killed | SIGKILL, started again under its id at once |
| worker stopped | SIGTERM: its requests end, it leaves the fleet, is started again |
| worker drained | the router is requested to drain it; once that is done it is stopped, and started again |
| worker frozen | SIGSTOP for 1 to 4 s, then SIGCONT |
| nats-server killed | SIGKILL, started again on the same store |
| nats-server stopped | SIGTERM, started again on the same store |

Growth is Theil and Sen's: the median of the slopes between all pairs of quiet moments, times the requests between the
first and the last of them. Each round ends with a quiet moment. One odd moment does not move the growth.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, groupby
from random import Random
from statistics import median
from typing import NamedTuple

import aiohttp
import psutil

from bench.report import machine_line, percentile
from bench.soak.clients import AnswerOutcome, Tally
from bench.tables import FigureTable, markdown_table

_DECK = {
    "worker killed": 3,
    "worker stopped": 2,
    "worker drained": 1,
    "worker frozen": 2,
    "nats-server killed": 1,
    "nats-server stopped": 1,
}
"""How many of each kind every ten faults have, in a random order."""
_FROZEN_S = (1.0, 4.0)


class Fault(NamedTuple):
    """A fault that comes once `at_request` requests have begun; a worker is frozen for `frozen_s`."""

    at_request: int
    kind: str
    frozen_s: float


def schedule(seed: int, requests: int, every: int) -> list[Fault]:
    """Return the faults, one after each `every` requests, but none once `requests` have begun."""
    draw, faults, deck = Random(seed), list[Fault](), list[str]()  # noqa: S311 - a workload, not a secret
    for at_request in range(every, requests, every):
        if not deck:
            deck = draw.sample([*_DECK], sum(_DECK.values()), counts=_DECK.values())
        faults.append(Fault(at_request, deck.pop(), draw.uniform(*_FROZEN_S)))
    return faults


_PREFIX = "kvrouter_"


class ResourceSample(NamedTuple):
    """The resources of a process at one moment."""

    rss_bytes: int
    descriptors: int
    threads: int
    cpu_s: float
    """Since the process began."""


class Quiet(NamedTuple):
    """One moment at which no request was in flight."""

    requests: int
    """Requests that had ended until then."""
    router: ResourceSample
    nats: ResourceSample
    workers: dict[str, ResourceSample]
    metrics: Counter[str]
    """The router's metrics, each summed over its labels."""
    clients: int
    """Connections that clients have open."""
    store_bytes: int
    """Disk that the nats-server's store takes."""
    verified: str
    """The differences that `indexer verify` found; empty: none."""


def taken(pid: int, *, sockets: int = 0) -> ResourceSample:
    """Return the resources of a running process, without `sockets`, which its clients have open."""
    process = psutil.Process(pid)
    with process.oneshot():
        cpu = process.cpu_times()
        return ResourceSample(
            process.memory_info().rss, process.num_fds() - sockets, process.num_threads(), cpu.user + cpu.system
        )


def one_request_sessions() -> aiohttp.ClientSession:
    """Return a session that keeps no connection open, so that it does not change the counted figures."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def totals(session: aiohttp.ClientSession, url: str) -> Counter[str]:
    """Return the metrics of a process, each without its prefix and summed over its labels."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    sums: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(_PREFIX):
            sample, _, value = line.rpartition(" ")
            sums[sample.partition("{")[0].removeprefix(_PREFIX)] += float(value)  # type: ignore[assignment]
    return sums


RSS_SHARE, RSS_BYTES = 0.04, 16 << 20
"""How much resident memory may grow: a share of it, or a number of bytes if that is more. A worker's mirror remembers
16,384 former blocks. With eight workers it is full after 100,000 requests: 95 MiB a worker, 83 MiB after 10,000.
"""
FILLED_AFTER, FILLING_BYTES = 100_000, 32 << 20
"""A router's memory may grow by more bytes if the first quiet moment is before this many requests: later the
prompts kept for drains (`router/prompt/chains.py`) and the routed blocks of the last 120 s are at their bounds.
In a run of 20,000 requests it grew by 37 MiB in all. Only longer runs find a leak of this size.
"""
DESCRIPTORS, THREADS = 3.0, 6.0
"""Threads: asyncio's pool starts another one while all of its threads are busy, up to cores + 4."""
UNPUBLISHED_RECORDS = 256
"""The most journal records that may wait for the next message at a quiet moment."""
ZERO_WHEN_QUIET = (
    "ledger_active_requests",
    "ledger_active_blocks",
    "ledger_prefill_tokens_queued",
    "inflight_requests",
    "queued_requests",
    "prompts_waiting_bytes",
    "stream_stale",
)
ZERO_FOR_EVER = (
    "stream_digest_mismatches_total",
    "stream_implausible_total",
    "index_refused_messages_total",
    "index_refused_blocks_total",
    "feed_refused_messages_total",
    "journal_lost_records_total",
    "leases_expired_total",
)


class Healed(NamedTuple):
    """A fault, the process that it hit, and how long the fleet took to recover once the fault's cause was removed."""

    fault: Fault
    process: str
    healed_s: float


class Soak(NamedTuple):
    """The results of a run."""

    tally: Tally
    faults: Sequence[Healed]
    quiet: Sequence[Quiet]
    complaints: Sequence[str]
    leases_peak: float
    users: int
    steady: Sequence[str] = ()
    """Workers that were never ended."""
    clients_cpu_s: float = 0.0


class Growth(NamedTuple):
    """How much one figure of one process grew after the first round, and how much it may."""

    process: str
    figure: str
    first: float
    last: float
    by: float
    allowed: float


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much y grows from the first x to the last; 0 for fewer than two points."""
    slopes = [(y - y0) / (x - x0) for (x0, y0), (x, y) in combinations(points, 2)]
    return median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0


def growths(soak: Soak) -> Iterator[Growth]:
    """Yield the growth of each figure of the router and of the workers that were never ended."""
    fills = bool(soak.quiet) and soak.quiet[0].requests < FILLED_AFTER
    for name in ("router", *soak.steady) if soak.quiet else ():
        moments = [(each.requests, each.router if name == "router" else each.workers[name]) for each in soak.quiet]
        for figure, of, allowed in _BOUNDS:
            points = [(float(requests), of(took)) for requests, took in moments]
            size = median(value for _, value in points)
            filling = FILLING_BYTES if fills and (name, figure) == ("router", _RSS) else 0
            yield Growth(name, figure, points[0][1], points[-1][1], growth(points), allowed(size) + filling)


_RSS = "resident memory, bytes"
_BOUNDS: tuple[tuple[str, Callable[[ResourceSample], float], Callable[[float], float]], ...] = (
    (_RSS, lambda took: float(took.rss_bytes), lambda size: max(RSS_SHARE * size, RSS_BYTES)),
    ("descriptors", lambda took: float(took.descriptors), lambda _: DESCRIPTORS),
    ("threads", lambda took: float(took.threads), lambda _: THREADS),
)


def problems(soak: Soak) -> list[str]:
    """Return the problems; empty for a good run."""
    return [
        *_lost(soak.tally),
        *(problem for quiet in soak.quiet for problem in _at_quiet(quiet)),
        *(
            f"{each.process}: {each.figure} grew by {each.by:,.0f}, {each.allowed:,.0f} allowed"
            for each in growths(soak)
            if each.by > each.allowed
        ),
        *(
            f"{name} is {quiet.metrics[name]:g}, 0 allowed"
            for quiet in soak.quiet[-1:]
            for name in ZERO_FOR_EVER
            if quiet.metrics[name]
        ),
        *(
            [f"{soak.leases_peak:g} leases at once of {soak.users} users with one request each"]
            if soak.leases_peak > 2 * soak.users
            else []
        ),
        *soak.complaints,
        *(["no round came to its end"] if not soak.quiet else []),
    ]


def _lost(tally: Tally) -> Iterator[str]:
    for outcome, count in tally.lost().items():
        for_example = "; ".join(tally.examples[outcome][:2])
        yield f"{count} requests lost: {outcome}; for example {for_example}"
    if not tally.total(AnswerOutcome.RIGHT):
        yield "no request was answered"


def _at_quiet(quiet: Quiet) -> Iterator[str]:
    at = f"quiet after {quiet.requests:,} requests"
    for name in ZERO_WHEN_QUIET:
        if quiet.metrics[name]:
            yield f"{at}: {name} is {quiet.metrics[name]:g}, 0 allowed"
    if quiet.metrics["journal_unpublished_records"] > UNPUBLISHED_RECORDS:
        found = quiet.metrics["journal_unpublished_records"]
        yield f"{at}: {found:g} records of the journal wait, {UNPUBLISHED_RECORDS} allowed"
    if quiet.metrics["http_connections"] != quiet.clients:
        yield f"{at}: the router has {quiet.metrics['http_connections']:g} connections, its clients {quiet.clients}"
    if quiet.verified:
        yield f"{at}: indexer verify: {quiet.verified}"


def markdown(soak: Soak, problems: Sequence[str], took_s: float) -> str:
    """Return the tables of a run, and its problems."""
    tables = (_requests(soak), _faults(soak), _growth(soak), _quiet(soak))
    return "\n".join([*_summary(soak, problems, took_s), "", *map(markdown_table, tables)])


def _summary(soak: Soak, problems: Sequence[str], took_s: float) -> Iterator[str]:
    tally = soak.tally
    yield f"{tally.requests:,} requests in {took_s / 60:.1f} minutes ({tally.requests / took_s:.0f}/s), "
    yield f"{tally.tokens:,} tokens checked, {len(soak.faults)} faults. {machine_line()}"
    yield ""
    yield f"* lost: {sum(tally.lost().values())}; ended with an error event because their worker died and they could "
    yield f"  not migrate: {tally.excused()}; right though their worker was killed in the midst: {tally.saved()}"
    p50_ms, p99_ms = (1000 * percentile(tally.latencies_s, quantile) for quantile in (0.5, 0.99))
    yield f"* latency: p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms"
    yield f"* CPU: {_cpu(soak)}"
    yield f"* most leases at once: {soak.leases_peak:g}, of {soak.users} users"
    yield f"* result: {'as it must be' if not problems else f'{len(problems)} problems'}"
    yield from (f"  * {problem}" for problem in problems)


def _cpu(soak: Soak) -> str:
    if len(soak.quiet) <= 1:
        return "one round is too short to tell"
    first, last = soak.quiet[0], soak.quiet[-1]
    requests = last.requests - first.requests
    router_s = last.router.cpu_s - first.router.cpu_s
    steady_s = [last.workers[name].cpu_s - first.workers[name].cpu_s for name in soak.steady]
    workers_s = sum(steady_s) / len(steady_s) * len(last.workers)
    return (
        f"router {1000 * router_s / requests:.2f} ms a request, all workers about {1000 * workers_s / requests:.2f} ms "
        f"(as those that were never ended), clients {1000 * soak.clients_cpu_s / soak.tally.requests:.2f} ms"
    )


def _requests(soak: Soak) -> FigureTable:
    rows = [
        (name, *(f"{counts.get(outcome, 0):,}" for outcome in AnswerOutcome))
        for name, counts in sorted(soak.tally.rows())
    ]
    totals = ("all", *(f"{soak.tally.total(outcome):,}" for outcome in AnswerOutcome))
    return FigureTable("requests", ("request", *AnswerOutcome), [*rows, totals])


def _faults(soak: Soak) -> FigureTable:
    rows = []
    by_kind = sorted(soak.faults, key=lambda each: each.fault.kind)
    for kind, healed in groupby(by_kind, key=lambda each: each.fault.kind):
        times_s = sorted(each.healed_s for each in healed)
        rows.append((kind, f"{len(times_s)}", f"{times_s[len(times_s) // 2]:.1f}", f"{times_s[-1]:.1f}"))
    return FigureTable("faults", ("fault", "times", "healed in s, median", "at most"), rows)


def _growth(soak: Soak) -> FigureTable:
    columns = ("process", "figure", "after a tenth", "at the end", "growth", "allowed")
    rows = [
        (each.process, each.figure, *(f"{number:,.0f}" for number in (each.first, each.last, each.by, each.allowed)))
        for each in growths(soak)
    ]
    return FigureTable("growth", columns, rows)


_METRICS = ("ledger_active_requests", "inflight_requests", "http_connections", "journal_unpublished_records")


def _quiet(soak: Soak) -> FigureTable:
    rows = [
        (
            f"{each.requests:,}",
            f"{each.router.rss_bytes >> 20}",
            f"{each.router.descriptors}",
            *(f"{each.metrics[name]:g}" for name in _METRICS),
            f"{each.nats.rss_bytes >> 20}",
            f"{each.store_bytes >> 20}",
            f"{max(took.rss_bytes for took in each.workers.values()) >> 20}",
            "differs" if each.verified else "equal",
        )
        for each in soak.quiet
    ]
    columns = (
        *("requests", "router MiB", "descriptors", *_METRICS),
        *("nats-server MiB", "store MiB", "largest worker MiB", "indexer verify"),
    )
    return FigureTable("at quiet moments", columns, rows)
