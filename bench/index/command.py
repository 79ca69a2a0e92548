"""`router bench index`: the index beside the strongest peer, each in a process of its own, on one core, in turns.

Only one process works at a time. A round is one turn of each seat, so a disturbance of the machine affects all of them.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

from bench.child import BenchFailed, Child, finished
from bench.index.plan import GROUPS, OURS, IndexCell, IndexPlan, ScheduleShape, cells, schedule, tables, verdicts
from bench.index.subjects import write_requests
from bench.routing.trace import TraceInvalid, load_trace
from bench.tables import Rounds, names_of, progress, report, report_options, verdict_table
from kv_runtime.process import child_environment

_ROOT = Path(__file__).parents[2]
_SEED = 1000
"""Of the first round."""


class SubjectAbsent(Exception):
    """A subject cannot be measured; the message has the reason."""


class Interpreters(NamedTuple):
    """What runs the processes: ours and the peer's, and the core they share (-1: any)."""

    python: str
    peer_python: str
    core: int


class Runner:
    """Measures cells with the processes of both subjects, which it starts."""

    def __init__(self, interpreters: Interpreters) -> None:
        self._interpreters = interpreters
        self._processes: dict[str, Child] = {}
        self.peer = ""
        """Its version, or why it is not measured."""

    async def run(self, cells: Sequence[IndexCell], on_progress: Callable[[str], None]) -> Rounds:
        """Return the figures of all cells by seat; `on_progress` gets the name of each cell once it is measured.

        Raises:
            SubjectAbsent: our own index is not there.
            BenchFailed: a process ended, or failed a request.
        """
        results = Rounds()
        async with AsyncExitStack() as stack:
            self._processes["native"] = await stack.enter_async_context(self._process("native"))
            try:
                peer = self._processes["peer"] = await stack.enter_async_context(self._process("peer"))
                self.peer = peer.started["version"]
            except SubjectAbsent as error:
                self.peer = f"absent ({error})"
            for cell in cells:
                seats = [seat for seat in cell.seats if _process_of(seat) in self._processes]
                await (self._isolated if cell.in_own_process else self._together)(cell, seats, results)
                on_progress(cell.name)
        return results

    async def _together(self, cell: IndexCell, seats: Sequence[str], results: Rounds) -> None:
        processes = {seat: self._processes[_process_of(seat)] for seat in seats}
        for seat, process in processes.items():
            await process.call("make", key=seat, **_request(cell, seat))
        for number in range(cell.rounds):
            for seat, process in processes.items():
                results.add(seat, cell.name, await process.call("round", key=seat, seed=_SEED + number))
        for seat, process in processes.items():
            await process.call("drop", key=seat)

    async def _isolated(self, cell: IndexCell, seats: Sequence[str], results: Rounds) -> None:
        for number in range(cell.rounds):
            for seat in seats:
                async with self._process(_process_of(seat)) as process:
                    await process.call("make", key=seat, **_request(cell, seat))
                    results.add(seat, cell.name, await process.call("round", key=seat, seed=_SEED + number))

    @asynccontextmanager
    async def _process(self, subject: str) -> AsyncIterator[Child]:
        """Yield a process with a subject in it: native or peer.

        Raises:
            SubjectAbsent: its interpreter is not there, or has no such subject.
        """
        python = self._interpreters.peer_python if subject == "peer" else self._interpreters.python
        arguments = {"subject": subject, "core": self._interpreters.core}
        environment = {**child_environment(), "PYTHONPATH": str(_ROOT), "DYN_LOG": "error"}
        try:
            child = await Child.start(
                "bench.index.cells", arguments, python=python, environment=environment, answer_s=None
            )
        except OSError as error:
            raise SubjectAbsent(f"{python}: {error.strerror}") from error
        try:
            if "absent" in child.started:
                raise SubjectAbsent(child.started["absent"])
            yield child
        finally:
            await child.close()


def _process_of(seat: str) -> str:
    return "native" if seat in OURS else "peer"


def _request(cell: IndexCell, seat: str) -> dict[str, Any]:
    parameters = cell.parameters | ({"held": "none"} if seat == "floor" else {})
    return {"work": cell.work, "shape": seat, "parameters": parameters}


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
