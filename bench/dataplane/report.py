"""The results of the data plane bench as tables, Markdown and JSON."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from bench.dataplane.run import (
    BURST,
    CRAWLED,
    HELD,
    HIGH_RATE,
    IDLE,
    LARGE,
    LEFT,
    PACED,
    SMALL,
    STREAM,
    DataplaneResults,
    MeasuredShape,
)
from bench.dataplane.systems import DIRECT, NGINX
from bench.dataplane.verdicts import AWARE, PLAIN, DataplaneVerdict, added_us, best_peer, ratio, verdicts
from bench.index.tables import NONE, FigureTable, number, times

_CELLS = {
    SMALL: "small",
    LARGE: "40 KB",
    PACED: "small, paced",
    STREAM: "stream of 8",
    BURST: "chunk, bursts",
    HIGH_RATE: "chunk, high rate",
}
_VERDICT_TEXT = {True: "reached", False: "MISSED", None: "not measured"}


class DataplaneFacts(NamedTuple):
    """Where and how the figures were measured."""

    machine: str
    commit: str
    shape: MeasuredShape
    is_quick: bool

    def lines(self, results: DataplaneResults) -> Iterator[str]:
        """Yield them as lines of text."""
        shape = self.shape
        own, others = shape.cores
        cores = f"each system on core {own}, all else on {others}" if own >= 0 else "not pinned to cores"
        yield f"{self.machine}; {cores}"
        yield f"commit {self.commit}; medians of {shape.rounds} rounds of {shape.seconds:g} s a cell, systems in turns"
        pace_ms = 1000 / shape.rate
        yield f"CPU is the system's own, user and system; small: 300 bytes; paced: every {pace_ms:g} ms, come what may"
        yield from results.absent


def tables(results: DataplaneResults) -> list[FigureTable]:
    """Return all tables."""
    return [_cpu(results), _rest(results), _ratios(results)]


def _cpu(results: DataplaneResults) -> FigureTable:
    columns = ("system", *_CELLS.values(), "small requests/s", "its nats-server, small")
    rows = []
    for plan in results.systems:
        if plan.kind == DIRECT:
            continue
        figures = (number(results.figure(plan.name, cell, "cpu_us")) for cell in _CELLS)
        rate = number(results.figure(plan.name, SMALL, "rate"))
        nats_us = results.figure(plan.name, SMALL, "nats_cpu_us")
        rows.append((plan.name, *figures, rate, number(nats_us or None)))
    return FigureTable("CPU us a request, a chunk", columns, rows)


def _rest(results: DataplaneResults) -> FigureTable:
    columns = (
        "system",
        "added p50, us",
        "added p99, us",
        "RSS, MiB",
        "streams at once",
        "failed, chunks missing",
        "RSS with them",
        "slow reader, MiB",
        "left, p50 ms",
        "left, worst ms",
        "idle, CPU ms/s",
        "errors",
    )
    rows = []
    for plan in results.systems:
        name = plan.name

        def figure(cell: str, what: str, name: str = name) -> str:
            return number(results.figure(name, cell, what))

        added = (number(added_us(results, name, each)) for each in ("p50_us", "p99_us"))
        if plan.kind == DIRECT:
            added = (f"({figure(PACED, each)})" for each in ("p50_us", "p99_us"))
        unseen = results.figure(name, LEFT, "unseen")
        rows.append(
            (
                name,
                *added,
                figure(SMALL, "rss_mib"),
                figure(HELD, "at_once"),
                f"{figure(HELD, 'errors')}, {figure(HELD, 'missing')}",
                figure(HELD, "rss_most_mib"),
                figure(CRAWLED, "rss_more_mib"),
                figure(LEFT, "p50_ms"),
                f"{unseen:.0f} unseen" if unseen else figure(LEFT, "worst_ms"),
                figure(IDLE, "cpu_ms_a_second"),
                str(results.errors(name)),
            )
        )
    return FigureTable("latency, memory, streams (direct: its own latency)", columns, rows)


def _ratios(results: DataplaneResults) -> FigureTable:
    columns = ("cell", "best peer", "its CPU us", f"{PLAIN} / it", f"{AWARE} / it", f"{PLAIN} / nginx")
    rows = []
    for cell, title in _CELLS.items():
        best = best_peer(results, cell)
        ours = [times(ratio(results, each, cell, best)) for each in (PLAIN, AWARE)]
        floor = times(ratio(results, PLAIN, cell, NGINX))
        rows.append((title, best or NONE, number(results.figure(best, cell, "cpu_us")) if best else NONE, *ours, floor))
    return FigureTable("CPU beside the best peer and the floor", columns, rows)


def verdict_table(results: DataplaneResults) -> FigureTable:
    """Return the targets with the measured values."""
    rows = [
        (
            each.target,
            f"{each.sign} {number(each.needed)}{each.unit}",
            f"{number(each.measured)}{each.unit if each.measured is not None else ''}{_note(each)}",
            _VERDICT_TEXT[each.holds],
        )
        for each in verdicts(results)
    ]
    return FigureTable("Targets", ("target", "needed", "measured", ""), rows)


def _note(verdict: DataplaneVerdict) -> str:
    return f", {verdict.told}" if verdict.told else ""


def as_json(facts: DataplaneFacts, results: DataplaneResults) -> bytes:
    """Return everything measured, every round of it."""
    return msgspec.json.encode(
        {
            "machine": facts.machine,
            "commit": facts.commit,
            "shape": facts.shape._asdict(),
            "is_quick": facts.is_quick,
            "absent": results.absent,
            "cells": [
                {"system": system, "cell": cell, "rounds": rounds} for (system, cell), rounds in results.rounds.items()
            ],
            "verdicts": [each._asdict() | {"holds": each.holds} for each in verdicts(results)],
        }
    )
