"""`router bench index`: the index beside the strongest peer and the machine's limits."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from bench.child import BenchFailed, finished
from bench.index.data import write_requests
from bench.index.plan import GROUPS, IndexPlan, cells
from bench.index.report import tables, verdicts
from bench.index.run import Interpreters, Runner, SubjectAbsent
from bench.index.schedule import ScheduleShape, schedule
from bench.routing.trace import TraceInvalid, load_trace
from bench.tables import names_of, progress, report, report_options, verdict_table

PEER_PYTHON = "KVROUTER_BENCH_PEER_PYTHON"
_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
_SCALE_JUDGED = 1.0
_QUICK_SCALE, _QUICK_ROUNDS = 0.02, 2
_SIZES = tuple(str(1 << power) for power in range(4, 10))  # 16..512: divisors of a trace's block


def _core() -> int:
    """Return the last core that this process may use; -1 where there is no choosing."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1


@click.command("index", context_settings={"show_default": True})
@click.option("--peer-python", envvar=PEER_PYTHON, help=f"an interpreter with ai-dynamo-runtime; also ${PEER_PYTHON}")
@click.option("--only", callback=names_of(GROUPS), default=",".join(GROUPS), help="groups of cells")
@click.option("--rounds", type=click.IntRange(min=1), default=7, help="turns of every seat; medians are shown")
@click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, help="so many times as much of all")
@click.option("--quick", is_flag=True, help=f"--scale {_QUICK_SCALE} --rounds {_QUICK_ROUNDS}: does it run at all")
@click.option("--huge", is_flag=True, help="also an index of 1e8 blocks")
@click.option("--core", type=int, default=_core(), help="all is measured on this one; -1: on any")
@click.option(
    "--trace",
    "file",
    type=click.Path(path_type=Path),
    default=_TRACE,
    show_default=f"{_TRACE.name} in shared/traces, beside the checkout",
    help="JSON lines in the form of the Mooncake traces; without them there is no replay",
)
@click.option("--requests", "requests_max", type=click.IntRange(min=1), help="only the trace's first so many")
@click.option("--block-size", type=click.Choice(_SIZES), default="32", help="tokens of a block of the trace")
@report_options
def index(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure the index: events, matches, a trace and its answers, memory; beside the peer.

    Each index runs in a process of its own, all pinned to one core, in turns; CPU times, medians of rounds. The peer is
    the radix tree of ai-dynamo-runtime, through Python; it is no dependency: name an interpreter that has it. Its floor
    is the same call on an empty tree. Ranks are registered with their capacity, as the service does, but for memory. At
    the end stands what the targets ask for at scale 1, reached or missed. The exit status says whether the bench ran.
    """
    with TemporaryDirectory() as directory:
        plan, trace_line = _plan(flags, Path(directory) / "schedule")
        selected = cells(plan, flags["only"])
        peer_python = flags["peer_python"] or sys.executable
        runner = Runner(Interpreters(sys.executable, peer_python, flags["core"]))
        with progress(len(selected)) as on_progress:
            found = finished(runner.run(selected, on_progress), (SubjectAbsent, BenchFailed))
    facts = [
        f"all on core {flags['core']}; peer: ai-dynamo-runtime {runner.peer}",
        f"medians of {plan.rounds} rounds, scale {plan.scale:g}; trace: {trace_line}",
    ]
    made = [*tables(found), *([verdict_table(verdicts(found))] if plan.scale == _SCALE_JUDGED else [])]
    report(facts, made, {"peer": runner.peer, "cells": found.plain()}, flags["json_file"], flags["markdown"])


def _plan(flags: dict[str, Any], written: Path) -> tuple[IndexPlan, str]:
    """Return the plan, and a line about the trace."""
    is_quick = flags["quick"]
    plan = IndexPlan(
        scale=_QUICK_SCALE if is_quick else flags["scale"],
        rounds=_QUICK_ROUNDS if is_quick else flags["rounds"],
        is_huge=flags["huge"],
        shape=ScheduleShape(block_size=int(flags["block_size"])),
    )
    if "trace" not in flags["only"]:
        return plan, "not asked for"
    file: Path = flags["file"]
    try:
        requests = load_trace(file, flags["requests_max"])
    except OSError as error:
        return plan, f"skipped ({file}: {error.strerror})"
    except TraceInvalid as error:
        raise click.ClickException(str(error)) from error
    count = write_requests(written, schedule(requests, plan.shape))
    shape = f"{plan.shape.ranks} ranks, {plan.shape.cache_blocks:,} blocks of {plan.shape.block_size} tokens each"
    return plan._replace(schedule=str(written)), f"{file.name}, {count:,} requests, {shape}"
