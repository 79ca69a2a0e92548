"""`router bench index`: the index beside the strongest peer and the machine's limits."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.index.plan import GROUPS, IndexCell, IndexPlan, cells
from bench.index.report import IndexFacts, as_json, as_markdown, commit, machine, show
from bench.index.results import IndexResults
from bench.index.run import BenchFailed, Interpreters, Runner, SubjectAbsent
from bench.index.schedule import ScheduleShape, write_schedule
from bench.routing.trace import TraceInvalid, load_trace

PEER_PYTHON = "KVROUTER_BENCH_PEER_PYTHON"
_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
_WIDTH = 150
"""Columns of a table that is not printed on a terminal."""
_QUICK_SCALE, _QUICK_ROUNDS = 0.02, 2
_SIZES = tuple(str(1 << power) for power in range(4, 10))  # 16..512: divisors of a trace's block


def _groups(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    groups = tuple(value.split(","))
    for each in groups:
        if each not in GROUPS:
            raise click.BadParameter(f"found {each!r}, allowed {', '.join(GROUPS)}")
    return groups


def _core() -> int:
    """Return the last core that this process may use; -1 where there is no choosing."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1


@click.command("index", context_settings={"show_default": True})
@click.option("--peer-python", envvar=PEER_PYTHON, help=f"an interpreter with ai-dynamo-runtime; also ${PEER_PYTHON}")
@click.option("--only", callback=_groups, default=",".join(GROUPS), help="groups of cells")
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
@click.option(
    "--json", "json_file", type=click.Path(allow_dash=True, path_type=Path), help="write all rounds; -: print"
)
@click.option("--markdown", type=click.Path(path_type=Path), help="write the tables, as docs/BENCHMARKS.md has them")
def index(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure the index: events, matches, a trace, memory; beside the peer and what the machine allows.

    Each index runs in a process of its own, all pinned to one core, in turns; CPU times, medians of rounds. The peer is
    the radix tree of ai-dynamo-runtime, through Python; it is no dependency: name an interpreter that has it. Its floor
    is the same call on an empty tree. Ranks are registered with their capacity, as the service does, but for memory and
    where a row says so. At the end stands what the targets ask for at scale 1, reached or missed. The exit status says
    whether the bench ran.
    """
    with TemporaryDirectory() as directory:
        plan, trace_line = _plan(flags, Path(directory) / "schedule")
        selected = cells(plan, flags["only"])
        interpreters = Interpreters(
            python=sys.executable,
            peer_python=flags["peer_python"] or sys.executable,
            core=flags["core"],
        )
        try:
            with Runner(interpreters, selected) as runner:
                facts = _facts(flags, plan, runner.peer, trace_line)
                _print_facts(facts, is_aside=str(flags["json_file"]) == "-")
                results = _run(runner, selected)
        except (SubjectAbsent, BenchFailed) as error:
            raise click.ClickException(str(error)) from error
    _write(flags, facts, results)


def _plan(flags: dict[str, Any], schedule: Path) -> tuple[IndexPlan, str]:
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
    count = write_schedule(schedule, requests, plan.shape)
    shape = f"{plan.shape.ranks} ranks, {plan.shape.cache_blocks:,} blocks of {plan.shape.block_size} tokens each"
    return plan._replace(schedule=str(schedule)), f"{file.name}, {count:,} requests, {shape}"


def _facts(flags: dict[str, Any], plan: IndexPlan, peer: str, trace: str) -> IndexFacts:
    return IndexFacts(
        machine=machine(),
        commit=commit(),
        peer=f"ai-dynamo-runtime {peer}",
        core=flags["core"],
        rounds=plan.rounds,
        scale=plan.scale,
        trace=trace,
    )


def _print_facts(facts: IndexFacts, *, is_aside: bool) -> None:
    for line in facts.lines():
        click.echo(line, err=is_aside)


def _run(runner: Runner, selected: list[IndexCell]) -> IndexResults:
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("", total=sum(map(runner.steps, selected)))
        return runner.run(selected, lambda name: progress.update(task, advance=1, description=name))


def _write(flags: dict[str, Any], facts: IndexFacts, results: IndexResults) -> None:
    if flags["markdown"] is not None:
        flags["markdown"].write_text(as_markdown(facts, results))
    if str(flags["json_file"]) == "-":
        click.echo(as_json(facts, results))
        return
    if flags["json_file"] is not None:
        flags["json_file"].write_bytes(as_json(facts, results))
    show(Console() if Console().is_terminal else Console(width=_WIDTH), facts, results)


if __name__ == "__main__":
    index()
