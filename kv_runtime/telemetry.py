"""Logs and metrics of a process.

Logs are events, named in the past tense, with fields. Metrics are made at scrape time, from what the parts of a
process count (`Projection`); a process has one registry, its own.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.samples import Sample as OneSample
from prometheus_client.utils import floatToGoString
from structlog.typing import EventDict, Processor, WrappedLogger

from kv_runtime.clock import Clock
from kv_runtime.process import printable
from kv_runtime.supervise import until

PREFIX = "kvrouter_"
LAG_PERIOD_S = 1.0
LOG_PERIOD_S = 10.0
LOG_KEYS_MAX = 256
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.5)
Family = Metric
Sample = tuple[tuple[str, ...], float]
Row = TypeVar("Row")
Exemplars = Mapping[tuple[str, ...], Mapping[float, Exemplar]]
"""Traced observations, by label values and by the upper bound of their bucket."""


def configure_logs(level: str) -> None:
    """Write log lines of the process and its libraries, from `level` up, to stderr: JSON, or text on a terminal."""
    number = logging.getLevelNamesMapping()[level.upper()]
    enrich: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    is_terminal = sys.stderr.isatty()
    renderers = [_escape, structlog.dev.ConsoleRenderer()] if is_terminal else [structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*enrich, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    libraries = logging.StreamHandler(sys.stderr)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *enrich],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [libraries]
    root.setLevel(number)


def _escape(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """Escape what a terminal would obey; a traceback keeps its lines."""
    texts = {key: printable(value) for key, value in line.items() if isinstance(value, str) and key != "exception"}
    return {**line, **texts}


class RateLimitedLog:
    """A log that writes an event of one key at most once in `LOG_PERIOD_S`.

    The next line of that key has a field `suppressed`: the number of events left out since the last one. Two events
    have the same key if they have the same name and an equal `key`, such as a reason. Memory is bounded: once
    `LOG_KEYS_MAX` keys were logged within the period, the events of all further keys share one line a period.
    Not thread-safe.
    """

    def __init__(self, log: structlog.typing.FilteringBoundLogger, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._lines: dict[Hashable, _Line] = {}  # the line written longest ago comes first
        self._shared = _Line(-inf, 0)

    def info(self, event: str, *, key: Hashable = None, **fields: Any) -> None:  # noqa: ANN401 - a log takes anything
        """Log the event at level info, unless its key was logged within the period."""
        self._write("info", event, key, fields)

    def warning(self, event: str, *, key: Hashable = None, **fields: Any) -> None:  # noqa: ANN401
        """Log the event at level warning, unless its key was logged within the period."""
        self._write("warning", event, key, fields)

    def error(self, event: str, *, key: Hashable = None, **fields: Any) -> None:  # noqa: ANN401
        """Log the event at level error, unless its key was logged within the period."""
        self._write("error", event, key, fields)

    def _write(self, level: str, event: str, key: Hashable, fields: dict[str, Any]) -> None:
        now_s, line = self._clock.now(), self._lines.get((event, key))
        if line is None and len(self._lines) >= LOG_KEYS_MAX:
            oldest = next(iter(self._lines))
            if now_s - self._lines[oldest].written_s < LOG_PERIOD_S:
                line = self._shared
            else:
                self._shared.suppressed += self._lines.pop(oldest).suppressed
        line = line or _Line(-inf, 0)
        if now_s - line.written_s < LOG_PERIOD_S:
            line.suppressed += 1
            return
        if line.suppressed:
            fields["suppressed"] = line.suppressed
        line.written_s, line.suppressed = now_s, 0
        if line is not self._shared:
            self._lines.pop((event, key), None)
            self._lines[event, key] = line
        getattr(self._log, level)(event, **fields)


@dataclass(slots=True)
class _Line:
    """When a key was logged last, and the number of its events suppressed since."""

    written_s: float
    suppressed: int


def new_registry() -> CollectorRegistry:
    """Return the process's registry; counters in it have no `_created` series."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library left it untyped
    return CollectorRegistry()


class LoopLag:
    """Measures how late the event loop is: a part of a process that sleeps and observes the excess."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        self._lag = Histogram(
            f"{PREFIX}event_loop_lag_seconds",
            "Delay of the event loop, measured every second",
            registry=registry,
            buckets=LAG_BUCKETS_S,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Observe until `stop` is set."""
        await until(stop, self._observe())

    async def _observe(self) -> None:
        while True:
            began_s = self._clock.now()
            await self._clock.sleep(LAG_PERIOD_S)
            self._lag.observe(max(0.0, self._clock.now() - began_s - LAG_PERIOD_S))


class Projection(Collector):
    """Samples made from statistics at scrape time."""

    def __init__(self, registry: CollectorRegistry, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families
        registry.register(self)

    def describe(self) -> Iterable[Family]:
        """Return nothing: names are not checked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the current families."""
        yield from self._families()


class MadeFamily(Metric):
    """A family that makes its samples while they are read; they can be read only once.

    The samples of 4,000 workers take half a second to make, which would hold up the event loop. The list of rows is
    copied at once; `made` must read all values of a row before it yields the first sample, so that the samples agree.
    """

    def __init__(
        self,
        name: str,
        meaning: str,
        kind: str,
        labels: tuple[str, ...],
        rows: Iterable[Row],
        made: Callable[[Row], Iterable[OneSample]],
    ) -> None:
        super().__init__(PREFIX + name, meaning, kind)
        self.labels = labels
        self.samples = chain.from_iterable(map(made, list(rows)))  # type: ignore[assignment]  # the library only iterates


def counter(name: str, meaning: str, labels: Iterable[str] = (), rows: Iterable[Sample] = ()) -> Family:
    """Return a counter family `kvrouter_<name>_total` with these samples: label values, then the count."""
    return MadeFamily(name, meaning, "counter", names := tuple(labels), rows, _single(f"{PREFIX}{name}_total", names))


def gauge(name: str, meaning: str, labels: Iterable[str] = (), rows: Iterable[Sample] = ()) -> Family:
    """Return a gauge family `kvrouter_<name>` with these samples: label values, then the value."""
    return MadeFamily(name, meaning, "gauge", names := tuple(labels), rows, _single(PREFIX + name, names))


def by_name(at: tuple[str, ...], figures: Mapping[Any, float]) -> list[Sample]:
    """Return a sample for each figure: the label values `at`, then the figure's name."""
    return [((*at, str(name)), figure) for name, figure in dict(figures).items()]


def _single(full_name: str, names: tuple[str, ...]) -> Callable[[Sample], Iterable[OneSample]]:
    return lambda row: (OneSample(full_name, dict(zip(names, row[0], strict=True)), row[1]),)


class Distribution(Protocol):
    """A histogram: `counts[i]` observations are above `bounds[i - 1]`, at most `bounds[i]`; the last are above all."""

    bounds: list[float]
    counts: list[int]
    total: float
    """The sum of all observations."""


Observed = tuple[tuple[str, ...], Distribution]
"""Label values, and the distribution of the observations with them."""


class Mean:
    """The number of observations and their sum: for metrics that need only the mean."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total: float = 0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.count += 1
        self.total += value


def histogram(
    name: str, meaning: str, labels: Iterable[str], rows: Iterable[Observed], exemplars: Exemplars | None = None
) -> Family:
    """Return a histogram family `kvrouter_<name>`; each row has label values, then the distribution.

    Exemplars are shown only in the OpenMetrics format. There is no `_sum` if a bound is below 0: it might decrease,
    which a reader takes for a restart.
    """
    full_name, names = PREFIX + name, tuple(labels)

    def made(row: Observed) -> Iterator[OneSample]:
        named, seen, cumulative = dict(zip(names, row[0], strict=True)), row[1], 0
        counts, total, bounds = list(seen.counts), seen.total, (*seen.bounds, float("inf"))
        traced = {} if exemplars is None else exemplars.get(row[0], {})
        for bound, count in zip(bounds, counts, strict=True):
            cumulative += count
            le = floatToGoString(bound)  # type: ignore[no-untyped-call]
            yield OneSample(f"{full_name}_bucket", named | {"le": le}, float(cumulative), None, traced.get(bound))
        yield OneSample(f"{full_name}_count", named, float(cumulative))
        if bounds[0] >= 0:
            yield OneSample(f"{full_name}_sum", named, total)

    return MadeFamily(name, meaning, "histogram", names, rows, made)


def summary(name: str, meaning: str, labels: Iterable[str], rows: Iterable[tuple[tuple[str, ...], Mean]]) -> Family:
    """Return a summary family `kvrouter_<name>` without quantiles; each row has label values, then the mean."""
    full_name, names = PREFIX + name, tuple(labels)

    def made(row: tuple[tuple[str, ...], Mean]) -> Iterable[OneSample]:
        named = dict(zip(names, row[0], strict=True))
        return (
            OneSample(f"{full_name}_count", named, row[1].count),
            OneSample(f"{full_name}_sum", named, row[1].total),
        )

    return MadeFamily(name, meaning, "summary", names, rows, made)
