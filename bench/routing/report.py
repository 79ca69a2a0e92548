"""The results of the routing-quality bench as tables and JSON."""

from collections.abc import Sequence
from itertools import product

import msgspec
from rich.console import Console
from rich.table import Table

from bench.report import machine_line
from bench.routing.figures import RoutingFigures
from bench.routing.grid import GridResult, GridShape, RoutingCell, control_cells, lag_cells
from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest, totals
from bench.routing.verdicts import RoutingVerdict, ratio_to_bound, verdicts

_COLUMNS = (
    "hit rate",
    "/ bound",
    "TTFT p50 ms",
    "p90",
    "p99",
    "E2E p50 s",
    "p90",
    "p99",
    "imbalance",
    "goodput /s",
    "in SLO",
)


def as_json(result: GridResult, requests: Sequence[TraceRequest]) -> bytes:
    """Return everything measured, on this machine; equal arguments give equal bytes."""
    return msgspec.json.encode(
        {
            "machine": machine_line(),
            "trace": totals(requests)._asdict(),
            "shape": result.shape._asdict(),
            "bound": [{"workers": workers, "hit_rate": rate} for workers, rate in result.bound.items()],
            "cells": [cell._asdict() | found._asdict() for cell, found in result.figures.items()],
            "verdicts": [verdict._asdict() | {"holds": verdict.holds} for verdict in verdicts(result)],
        }
    )


def show(console: Console, result: GridResult) -> None:
    """Print the tables and the verdicts."""
    shape = result.shape
    for slowdown in shape.slowdowns:
        title = f"routing quality, events {shape.lags_s[0] * 1000:g} ms late, engines x{slowdown:g}"
        console.print(_grid_table(result, slowdown, title))
    if lags := lag_cells(shape):
        console.print(_table(result, f"{_where(lags[0])}, mode {lags[0].mode}, by lag of events", lags, "lag"))
    if control := control_cells(shape):
        console.print(_table(result, f"{_where(control[0])}, control: no two prompts share a block", control, "mode"))
    for verdict in verdicts(result):
        for line in _lines(verdict):
            console.print(line, highlight=False)


def trace_lines(shape: GridShape, requests: Sequence[TraceRequest]) -> tuple[str, str]:
    """Return what the trace is, and how its distinct blocks compare with the fleets' caches."""
    trace = totals(requests)
    blocks = trace.distinct_tokens // TRACE_BLOCK_TOKENS
    fleets = ", ".join(f"{workers}: {workers * shape.kv_tokens:,}" for workers in shape.workers)
    tokens = f"{trace.prompt_tokens:,} prompt tokens, {trace.answer_tokens:,} answer tokens"
    contended = f"distinct prompt blocks: {blocks:,} = {trace.distinct_tokens:,} tokens"
    return (
        f"{trace.requests:,} requests in {trace.span_s:,.0f} s, {tokens}",
        f"{contended}; KV tokens of a fleet, by workers: {fleets}",
    )


def _grid_table(result: GridResult, slowdown: float, title: str) -> Table:
    shape = result.shape
    table = _new_table(title, "workers", "rate", "mode")
    for workers, rate in product(shape.workers, shape.rates):
        for mode in shape.modes:
            found = result.figures[RoutingCell(workers, rate, mode, shape.lags_s[0], slowdown)]
            table.add_row(f"{workers}", f"{rate:g}", mode, *_row(found, result.bound[workers]))
        table.add_section()
    return table


def _table(result: GridResult, title: str, cells: Sequence[RoutingCell], first: str) -> Table:
    table = _new_table(title, first)
    for cell in cells:
        name = f"{cell.lag_s * 1000:g} ms" if first == "lag" else cell.mode
        table.add_row(name, *_row(result.figures[cell], result.bound[cell.workers] if cell.shared else 0.0))
    return table


def _where(cell: RoutingCell) -> str:
    return f"{cell.workers} workers x {cell.rate:g}"


def _new_table(title: str, *first: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    return table


def _row(found: RoutingFigures, bound: float) -> list[str]:
    return [
        f"{found.hit_rate:.1%}",
        f"{ratio_to_bound(found, bound):.2f}" if bound else "-",
        *(f"{each * 1000:,.0f}" for each in found.ttft_s),
        *(f"{each:.2f}" for each in found.e2e_s),
        f"{found.imbalance:.2f}",
        f"{found.goodput_rps:.2f}",
        f"{found.slo_rate:.1%}",
    ]


def _lines(verdict: RoutingVerdict) -> list[str]:
    outcome = "reached" if verdict.holds else "MISSED "
    first = f"{outcome}  {verdict.target}: {verdict.reached} of {verdict.of} cells, {verdict.needed} needed"
    return [first, *(f"           lost: {each}" for each in verdict.losing)]
