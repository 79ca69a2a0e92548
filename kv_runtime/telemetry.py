"""Logs and metrics: how a process says what happened, and how it shows how it is.

Logs are past-tense facts with fields. Metrics are a projection of frozen statistics at scrape time (`Projection`); a
process has one registry, its own.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "kvrouter_"
Family = CounterMetricFamily | GaugeMetricFamily
Sample = tuple[tuple[str, ...], float]


def configure_logs(level: str, log_format: Literal["auto", "json", "console"]) -> None:
    """Every log line of this process goes to standard error from `level` up, as JSON or for people."""
    for_people = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
            if for_people
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


class Projection(Collector):
    """Samples made from statistics when they are scraped, never before."""

    def __init__(self, registry: CollectorRegistry, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families
        registry.register(self)

    def describe(self) -> Iterable[Family]:
        """Return nothing: names are not checked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the families of this moment."""
        yield from self._families()


def counter(name: str, meaning: str, labels: Iterable[str] = (), samples: Iterable[Sample] = ()) -> Family:
    """Return a counter family `kvrouter_<name>_total` with these samples: label values, then the count."""
    family = CounterMetricFamily(PREFIX + name, meaning, labels=list(labels))
    for values, count in samples:
        family.add_metric(values, count)
    return family


def gauge(name: str, meaning: str, labels: Iterable[str] = (), samples: Iterable[Sample] = ()) -> Family:
    """Return a gauge family `kvrouter_<name>` with these samples: label values, then the value."""
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=list(labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family
