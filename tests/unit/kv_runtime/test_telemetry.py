"""Logs are lines that machines read; metrics are made when they are scraped; the loop's lag is read off the clock."""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import structlog
from prometheus_client import Histogram, generate_latest
from prometheus_client.samples import Exemplar

from kv_runtime import telemetry
from kv_runtime.telemetry import (
    Exemplars,
    Family,
    LoopLag,
    Projection,
    RateLimitedLog,
    configure_logs,
    histogram,
    new_registry,
)
from router.native import built
from tests.support.manual_clock import ManualClock

Configure = Callable[[str], None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Configure]:
    """Configure logs as a process does; afterwards they are as they were."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.setattr(root, "handlers", [])
    yield configure_logs
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers, root.level = handlers, level
    capfd.readouterr()


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    written = capfd.readouterr()
    assert written.out == ""
    assert written.err.endswith("\n") or not written.err
    return written.err.splitlines()


def records(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(capfd)]


def fail() -> None:
    raise ValueError("first\nsecond")


class Unprintable:
    def __repr__(self) -> str:
        return "<a\nthing>"


# ---------------------------------------------------------------- logs


@pytest.mark.parametrize(
    "value", ["two\nlines", b"\x00\xff", Unprintable(), {"a": {1, 2}}, None, "\u2028", "ü", 2**70, ValueError("a\nb")]
)
def test_whatever_is_logged_is_one_line_of_json(
    configure: Configure, capfd: pytest.CaptureFixture[str], value: object
) -> None:
    configure("info")
    structlog.get_logger("x").info("happened", value=value)
    (record,) = records(capfd)
    assert record["event"] == "happened"


def test_logs_of_libraries_are_lines_of_json_as_well(configure: Configure, capfd: pytest.CaptureFixture[str]) -> None:
    configure("info")
    try:
        fail()
    except ValueError:
        logging.getLogger("asyncio").exception("Task %s failed", "a")
    logging.getLogger("nats.aio.client").error("nats: encountered error")
    logging.getLogger("aiohttp.server").debug("a detail that is not logged")
    first, second = records(capfd)
    assert (first["event"], first["level"], first["logger"]) == ("Task a failed", "error", "asyncio")
    assert "second" in first["exception"]
    assert (second["event"], second["logger"]) == ("nats: encountered error", "nats.aio.client")


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_what_is_below_the_level_is_not_written(
    configure: Configure, capfd: pytest.CaptureFixture[str], level: str, expected: list[str]
) -> None:
    configure(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(structlog.get_logger("x"), name)("ours")
        getattr(logging.getLogger("theirs"), name)("theirs")
    assert [record["level"] for record in records(capfd)] == [name for name in expected for _ in range(2)]


def test_a_logger_made_before_is_configured_as_well(configure: Configure, capfd: pytest.CaptureFixture[str]) -> None:
    log = structlog.get_logger("early")
    configure("info")
    log.info("happened")
    assert [record["event"] for record in records(capfd)] == ["happened"]


def test_on_a_terminal_lines_are_for_people_and_obey_no_name(
    configure: Configure, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure("info")
    structlog.get_logger("x").info("happened", worker="\x1b[2J", model="\x9b\nmodel")
    logging.getLogger("x").warning("theirs %s", "\x1b[2J\n")
    first, second = (re.sub(r"\x1b\[\d+m", "", line) for line in lines(capfd))
    assert "happened" in first
    assert r"model=\x9b\nmodel worker=\x1b[2J" in " ".join(first.split())
    assert r"theirs \x1b[2J\n" in second


# ---------------------------------------------------------------- metrics


def shown(family: Family) -> list[str]:
    registry = new_registry()
    Projection(registry, lambda: [family])
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("values", [[], [0.5], [3, 1, 2, 1e9, 0.25, 1, -4]])
def test_a_distribution_shows_what_the_librarys_own_histogram_shows(values: list[float]) -> None:
    bounds, registry = (-1.0, 0.0, 1.0, 2.0), new_registry()
    for each in (bounds, bounds[2:]):
        theirs = Histogram(f"kvrouter_x{len(each)}", "X", registry=registry, buckets=each)
        ours = built.Histogram(each)
        for value in values:
            theirs.observe(value)
            ours.observe(value)
        lines = [line for line in generate_latest(registry).decode().splitlines() if f"x{len(each)}" in line]
        assert shown(histogram(f"x{len(each)}", "X", (), [((), ours)])) == [
            line for line in lines if not line.startswith("#")
        ]


def test_samples_of_a_distribution_agree_whatever_is_observed_while_they_are_read() -> None:
    seen, values = built.Histogram((1.0,)), list[float]()
    seen.observe(0.5)
    for sample in histogram("x", "X", (), [((), seen)]).samples:
        values.append(sample.value)
        seen.observe(0.5)
    assert values == [1.0, 1.0, 1.0, 0.5]


def test_traced_observations_are_exemplars_of_their_buckets() -> None:
    seen, labels = built.Histogram((1.0, 2.0)), ("kv",)
    exemplars: Exemplars = {
        labels: {1.0: Exemplar({"trace_id": "b"}, 1.0), float("inf"): Exemplar({"trace_id": "c"}, 9.0)}
    }
    rows = [(labels, seen), (("other",), built.Histogram((1.0, 2.0)))]
    made = partial(histogram, "wait_seconds", "Waits", ("mode",), rows, exemplars)
    buckets = [sample for sample in made().samples if sample.name.endswith("_bucket")]
    found = [each.exemplar and (each.exemplar.labels["trace_id"], each.exemplar.value) for each in buckets]
    assert found == [("b", 1.0), None, ("c", 9.0), None, None, None]
    assert [line for line in shown(made()) if "trace_id" in line] == []


# ---------------------------------------------------------------- loop lag


def observed(generated: bytes, name: str) -> float:
    prefix = f"kvrouter_event_loop_lag_seconds_{name} "
    (line,) = [line for line in generated.decode().splitlines() if line.startswith(prefix)]
    return float(line.removeprefix(prefix))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Oversleeping(ManualClock):
    """A clock whose sleeps take so much longer than they should; those that follow never end."""

    def __init__(self, *late_s: float) -> None:
        super().__init__()
        self._late_s = [*late_s]
        self._at_s = 0.0

    def now(self) -> float:
        return self._at_s

    async def sleep(self, seconds: float) -> None:
        """Return late."""
        if not self._late_s:
            await asyncio.Event().wait()
        self._at_s += seconds + self._late_s.pop(0)


async def test_the_loops_lag_is_how_late_a_sleep_ends() -> None:
    clock, registry, stop = Oversleeping(0.0, 0.02, 0.3), new_registry(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(LoopLag(registry, clock).run(stop))
        await settle()
        generated = generate_latest(registry)
        stop.set()
    assert observed(generated, "count") == 3
    assert observed(generated, "sum") == pytest.approx(0.32)
    assert b'lag_seconds_bucket{le="0.025"} 2.0' in generated


async def test_a_rate_limited_event_is_logged_once_a_period_and_then_says_how_many_were_left_out() -> None:
    clock = ManualClock()
    with structlog.testing.capture_logs() as logged:
        log = RateLimitedLog(structlog.get_logger(), clock)
        for _ in range(4):
            log.warning("message_refused", key="size", reason="size")
        log.warning("message_refused", key="undecodable", reason="undecodable")
        await clock.advance(10.0)
        log.warning("message_refused", key="size", reason="size")
        await clock.advance(10.0)
        log.warning("message_refused", key="size", reason="size")
    refused = {"event": "message_refused", "log_level": "warning"}
    assert logged == [
        {**refused, "reason": "size"},
        {**refused, "reason": "undecodable"},
        {**refused, "reason": "size", "suppressed": 3},
        {**refused, "reason": "size"},
    ]


async def test_events_of_more_keys_than_are_kept_share_one_line_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "LOG_KEYS_MAX", 2)
    clock = ManualClock()
    with structlog.testing.capture_logs() as logged:
        log = RateLimitedLog(structlog.get_logger(), clock)
        for number in range(6):
            log.error("refused", key=number, number=number)
        await clock.advance(10.0)
        log.info("refused", key=6, number=6)  # the line of key 0 is older than the period: it makes room
        log.info("refused", key=7, number=7)
        log.info("refused", key=8, number=8)
    assert [(line["number"], line.get("suppressed")) for line in logged] == [
        (0, None), (1, None), (2, None), (6, None), (7, None), (8, 3),
    ]  # fmt: skip


async def test_no_event_of_a_rate_limited_log_goes_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "LOG_KEYS_MAX", 3)
    clock, events = ManualClock(), 500
    with structlog.testing.capture_logs() as logged:
        log = RateLimitedLog(structlog.get_logger(), clock)
        for number in range(events):
            log.warning("refused", key=number % 7)
            await clock.advance(1.0)
        for _ in range(4):  # three keys that make room, and the shared line
            await clock.advance(10.0)
            for key in range(7, 11):
                log.warning("refused", key=key)
    counted = sum(1 + line.get("suppressed", 0) for line in logged)
    assert counted == events + 4 * 4
