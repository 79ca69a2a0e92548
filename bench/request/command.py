"""`router bench request`: where the CPU time of one request goes."""

from collections.abc import Mapping
from typing import Any

import click

from bench.child import BenchFailed, finished
from bench.dataplane.command import cores
from bench.dataplane.systems import SystemAbsent, on_core
from bench.request.run import MODES, SHAPES, MeasuredAmount, RequestBench
from bench.request.stages import ELSE, LOOP, STAGES, Moment, own_shares, shares
from bench.rounds import Rounds
from bench.tables import FigureTable, number, progress, report, report_options

ORDER = (*STAGES, LOOP, ELSE)
"""The stages, in the order of the tables."""
_FUNCTIONS = 20
_QUICK = {"rounds": 1, "seconds": 0.3, "sample_s": 0.3}


@click.command("request", context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="turns of every request; medians are shown")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 60), default=2.0, help="how long a request is repeated in a round"
)
@click.option(
    "--sample", "sample_s", type=click.FloatRange(0.1, 300), default=15.0, help="seconds of sampling a column"
)
@click.option("--quick", is_flag=True, help="one short round: does it run at all")
@report_options
def request(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure where the CPU time of one request goes, by stage and by function.

    Routers are real processes with metrics, ledger and journal on, in modes kv and round-robin. The exit status says
    whether the bench ran.
    """
    if flags["quick"]:
        flags |= _QUICK
    amount = MeasuredAmount(flags["rounds"], flags["seconds"], flags["sample_s"], cores())
    with on_core(amount.cores[1]):
        found = finished(_measured(amount), (BenchFailed, SystemAbsent))
    facts = [f"routers on core {amount.cores[0]}; medians of {amount.rounds} rounds of {amount.seconds:g} s"]
    measured = {
        "cells": found.rounds.plain(),
        "stages": [{"mode": key[0], "shape": key[1], "shares": shares(each)} for key, each in found.moments.items()],
        "failed": found.failed,
    }
    made = tables(found.rounds, found.moments)
    report([*facts, *found.failed], made, measured, flags["json_file"], flags["markdown"])


async def _measured(amount: MeasuredAmount) -> RequestBench:
    async with RequestBench(amount) as bench:
        await bench.begin()
        with progress(bench.steps) as on_progress:
            await bench.run(on_progress)
    return bench


def tables(rounds: Rounds, moments: Mapping[tuple[str, str], list[Moment]]) -> list[FigureTable]:
    """Return the CPU of each request: all and the kernel's, by stage, and the functions with the most."""
    columns = [f"{mode}, {shape}" for mode, shape in moments]
    cpu_us = {key: rounds.figure(*key, "cpu_us") or 0.0 for key in moments}
    by_stage = {key: shares(each) for key, each in moments.items()}
    by_function = {key: own_shares(each) for key, each in moments.items()}

    def row(title: str, name: str, found: Mapping[tuple[str, str], Mapping[str, float]]) -> tuple[str, ...]:
        return (title, *(number(of.get(name, 0.0) * cpu_us[key]) for key, of in found.items()))

    most = [*by_function[MODES[0], next(iter(SHAPES))]][:_FUNCTIONS]
    stages = [
        ("all", *(number(each) for each in cpu_us.values())),
        ("of it in the kernel", *(number(rounds.figure(*key, "kernel_us")) for key in moments)),
        *(row(stage, stage, by_stage) for stage in ORDER),
    ]
    functions = [row(f"`{name}`", name, by_function) for name in most]
    return [
        FigureTable("CPU us of a request by stage", ("stage", *columns), stages),
        FigureTable("CPU us of our functions, with the libraries that they call", ("function", *columns), functions),
    ]
