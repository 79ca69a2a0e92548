"""Aggregated and disaggregated layouts compared, as tables, JSON and a plot."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.disagg.figures import DisaggFigures, LayoutComparison, slo_name
from bench.disagg.grid import DisaggCell, Grid, compared
from bench.plot import Point, pareto_labels, plotted
from bench.routing.trace import TraceRequest, totals

Found = dict[DisaggCell, DisaggFigures]
TITLE = "Prefill and decode apart: what a GPU gives, what a user gets"
SERVED_RATE = 0.9
"""A run served its users where no request failed and so many met the first SLO."""


def as_json(grid: Grid, found: Found, requests: Sequence[TraceRequest]) -> bytes:
    """Return everything measured; equal arguments give equal bytes, on any machine."""
    setting = grid.setting
    results: dict[str, Any] = {
        "trace": totals(requests)._asdict() | {"isl_max": max(each.isl_tokens for each in requests)},
        "setting": setting._asdict() | {"limits": setting.limits._asdict()},
        "slos": [slo._asdict() for slo in grid.slos],
        "cells": [
            {"rate": cell.rate, "layout": cell.layout.name} | each._asdict()
            for cell, each in ((cell, found[cell]) for cell in grid.cells)
        ],
        "comparisons": [each._asdict() for each in compared(grid, found)],
    }
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


def plot(grid: Grid, found: Found) -> str:
    """Return the SVG: a line for every layout, its points at the rates in turn."""
    lines = {
        layout.name: [_point(rate, found[DisaggCell(rate, layout)]) for rate in sorted(grid.rates)]
        for layout in grid.layouts
    }
    return plotted(lines, pareto_labels(TITLE)).decode()


def _point(rate: float, each: DisaggFigures) -> Point:
    is_served = not each.failed and each.slo_rate[0] >= SERVED_RATE
    return Point(each.tokens_s_user, each.tokens_s_gpu, f"x{rate:g}", is_served=is_served)


def setting_lines(grid: Grid, requests: Sequence[TraceRequest]) -> tuple[str, ...]:
    """Return lines about the trace and the setting."""
    trace, setting = totals(requests), grid.setting
    transfers, limits = setting.transfers, setting.limits
    rates = ", ".join(f"x{rate:g} = {len(requests) * rate / (trace.span_s or 1):.2f}/s" for rate in grid.rates)
    longest, latency = max(each.isl_tokens for each in requests), f"{transfers.latency_s * 1e3:g} ms a transfer"
    return (
        f"{trace.requests:,} requests in {trace.span_s:,.0f} s at x1 ({rates}); seed {setting.seed}",
        f"{trace.prompt_tokens:,} prompt tokens, the longest {longest:,}; {trace.answer_tokens:,} answer tokens",
        f"{grid.layouts[0].gpus} GPUs of {setting.kv_tokens:,} KV tokens, blocks of {setting.block_size}",
        f"KV: {transfers.token_bytes / 1024:g} KiB a token, {transfers.bandwidth_bytes_s / 1e9:g} GB/s, {latency}",
        f"mode {setting.policy.mode}; prefill_busy {limits.prefill_busy:g}, decode_busy {limits.decode_busy:g}",
    )


def show(console: Console, grid: Grid, found: Found, requests: Sequence[TraceRequest]) -> None:
    """Print the setting, every cell, and the better layout at each rate."""
    for line in setting_lines(grid, requests):
        console.print(line, highlight=False, soft_wrap=True)
    table = _new_table(
        "every cell; goodput and share by SLO (ms of TTFT / of ITL)",
        ("rate", "layout"),
        ("TTFT p50 ms", "p90", "ITL p50 ms", "p90"),
        *((f"goodput/GPU {slo_name(slo)}", "in SLO") for slo in grid.slos),
        ("tok/s/GPU", "tok/s/user", "hit rate", "local", "handover p50 ms", "transfer ms", "failed"),
    )
    for rate in grid.rates:
        for layout in grid.layouts:
            table.add_row(
                f"x{rate:g}", layout.name, *_row(found[DisaggCell(rate, layout)], is_apart=bool(layout.prefill))
            )
        table.add_section()
    console.print(table)
    if rows := compared(grid, found):
        console.print(_compared(rows))


def _row(each: DisaggFigures, *, is_apart: bool) -> list[str]:
    goodput = ((f"{rps:.3f}", f"{rate:.1%}") for rps, rate in zip(each.goodput_rps_gpu, each.slo_rate, strict=True))
    return [
        *(f"{seconds * 1e3:,.0f}" for seconds in each.ttft_s),
        *(f"{seconds * 1e3:.1f}" for seconds in each.itl_s),
        *(text for pair in goodput for text in pair),
        f"{each.tokens_s_gpu:.1f}",
        f"{each.tokens_s_user:.1f}",
        f"{each.hit_rate:.1%}",
        f"{each.local_rate:.0%}" if is_apart else "-",
        f"{each.handover_s[0] * 1e3:,.0f}" if is_apart else "-",
        f"{each.transfer_s * 1e3:,.0f}" if is_apart else "-",
        f"{each.failed}",
    ]


def _compared(rows: Sequence[LayoutComparison]) -> Table:
    table = _new_table(
        "aggregated against the best of the others in which nothing failed",
        ("rate", "figure"),
        ("aggregated", "best of the others", "", "better"),
    )
    for each in rows:
        digits = 3 if "goodput" in each.figure else 1
        own, other = (f"{value:,.{digits}f}" for value in (each.aggregated, each.value))
        table.add_row(f"x{each.rate:g}", each.figure, own, other, each.best, each.winner or "neither")
    return table


def _new_table(title: str, first: Sequence[str], *columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name, no_wrap=True)
    for group in columns:
        for name in group:
            table.add_column(name, justify="right")
    return table
