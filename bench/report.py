"""Figures of a run, and the machine that they were measured on."""

import math
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

WINDOW_S = 10.0
_CLOCK_KIND_BITS, _CLOCK_OF_SCHEDULER = 3, 2
"""Fields of the id of a process's CPU clock. Source: clock_getcpuclockid(3), as Linux has it."""
LAG_LIMIT_S = 0.010
_CPU_INFO = Path("/proc/cpuinfo")


def percentile(values: Sequence[float], quantile: float) -> float:
    """Return the value below which a share `quantile` of the values lies (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


def lag_counts(exposition: str) -> Counter[float]:
    """Return the cumulative counts of a process's event-loop lag, by bucket's upper bound in seconds."""
    counts: Counter[float] = Counter()
    for line in exposition.splitlines():
        if line.startswith("kvrouter_event_loop_lag_seconds_bucket{le="):
            bound, _, count = line.partition('le="')[2].partition('"} ')
            counts[float(bound)] = int(float(count))
    return counts


def lag_s(before: Counter[float], after: Counter[float], quantile: float) -> float:
    """Return the upper bound of the bucket that holds this quantile of what was observed in between."""
    total = after[math.inf] - before[math.inf]
    return min((bound for bound in after if after[bound] - before[bound] >= quantile * total), default=0.0)


def imbalances(requests: Iterable[tuple[float, str | int, int]], *, workers: int) -> list[float]:
    """Return the most uncached tokens of a worker over the mean of all `workers`, for each window; 1.0 is even.

    A request is its time in seconds, its worker and its uncached tokens; windows of `WINDOW_S` without such
    tokens do not count. If there is no window, the result is `[1.0]`.
    """
    windows: defaultdict[int, Counter[str | int]] = defaultdict(Counter)
    for at_s, worker, uncached_tokens in requests:
        windows[int(at_s // WINDOW_S)][worker] += uncached_tokens
    found = [max(tokens.values()) * workers / tokens.total() for tokens in windows.values() if tokens.total()]
    return found or [1.0]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its past and present threads, on Linux from its CPU clock."""
    if psutil.LINUX:
        return time.clock_gettime_ns((~pid << _CLOCK_KIND_BITS) | _CLOCK_OF_SCHEDULER) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def machine_line() -> str:
    """Return one line about this machine and its processor, if the system names it."""
    memory_gib = psutil.virtual_memory().total / 2**30
    line = f"{platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"
    info = _CPU_INFO.read_text() if _CPU_INFO.exists() else ""
    models = [each.partition(":")[2] for each in info.splitlines() if each.startswith("model name")]
    return ",".join((line, *models[:1]))
