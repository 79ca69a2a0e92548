"""`router bench events`: the path of KV events from an engine's flush into an index."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.events.cold import cold
from bench.events.freshness import freshness
from bench.events.heartbeats import heartbeats
from bench.events.plan import GROUPS, QUICK, EventsPlan
from bench.events.recovery import recovery
from bench.events.results import EventResults, as_plain
from bench.events.run import BenchFailed
from bench.events.tables import tables, verdict_table
from bench.events.throughput import throughput
from bench.events.verdicts import verdicts
from bench.index.report import commit, machine, markdown_table, rich_table
from bench.index.tables import FigureTable
from bench.processes import ProcessFailed
from kv_runtime.event_log import BrokerUnavailable
from kv_runtime.nats_server import NatsServerError
from kv_runtime.process import run_process
from kv_runtime.supervise import until

_WIDTH = 160
_NOT_JUDGED = "targets are for the full run"
_POLL_S = 1.0
_MEASURED: dict[str, Callable[[EventsPlan, Callable[[str], None]], Awaitable[Any]]] = {
    "freshness": freshness,
    "throughput": throughput,
    "cold": cold,
    "recovery": recovery,
    "pulse": heartbeats,
}


class EventFacts(NamedTuple):
    """Where the figures were measured. `others_ratio` is the use of the machine before the bench started."""

    machine: str
    commit: str
    others_ratio: float
    is_full: bool

    def lines(self) -> list[str]:
        """Return them as text."""
        return [
            self.machine,
            f"commit {self.commit}; before it began, others used {self.others_ratio:.0%} of the machine",
        ]


def _groups(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    groups = tuple(value.split(","))
    for each in groups:
        if each not in GROUPS:
            raise click.BadParameter(f"found {each!r}, allowed {', '.join(GROUPS)}")
    return groups


@click.command("events", context_settings={"show_default": True})
@click.option("--only", callback=_groups, default=",".join(GROUPS), help="groups that are measured")
@click.option("--quick", is_flag=True, help="very little of all: does it run")
@click.option("--json", "json_file", type=click.Path(allow_dash=True, path_type=Path), help="write all; -: print")
@click.option("--markdown", type=click.Path(path_type=Path), help="write the tables, as docs/BENCHMARKS.md has them")
def events(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure the event plane on real processes: agents, a nats-server, an index, all on this host.

    \b
    freshness    how old an event is when it is applied, at given rates and while requests flow
    throughput   how many blocks a second pass, by blocks an event, and what CPU they take
    cold         how soon a new index is current, from a snapshot, the log, or dumps
    recovery     how soon a rank is right again, and what that takes on the wire
    pulse        what heartbeats with digests cost

    Beside each stands what the log alone needs for the same, with a bare client. At the end stands what the targets ask
    for, reached or missed. The exit status says whether the bench ran. A full run takes about 5 minutes.
    """  # noqa: D301  (click reads the character, not its name)
    plan = QUICK if flags["quick"] else EventsPlan()
    facts = EventFacts(machine(), commit(), psutil.cpu_percent(_POLL_S) / 100, plan.is_full)
    is_aside = str(flags["json_file"]) == "-"
    for line in facts.lines():
        click.echo(line, err=is_aside)
    found: dict[str, Any] = {}
    try:
        run_process(lambda stop: _measure(plan, flags["only"], found, stop))
    except (BenchFailed, ProcessFailed, NatsServerError, BrokerUnavailable) as error:
        raise click.ClickException(str(error)) from error
    _write(flags, facts, EventResults(**found))


async def _measure(plan: EventsPlan, groups: tuple[str, ...], found: dict[str, Any], stop: asyncio.Event) -> None:
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("", total=len(groups))
        for group in groups:

            def on_progress(name: str, group: str = group) -> None:
                progress.update(task, description=f"{group}: {name}")

            measured = await until(stop, _MEASURED[group](plan, on_progress))
            if stop.is_set():
                return
            found[group] = measured
            progress.advance(task)


def _all_tables(facts: EventFacts, results: EventResults) -> list[FigureTable]:
    return tables(results) + ([verdict_table(verdicts(results))] if facts.is_full else [])


def _write(flags: dict[str, Any], facts: EventFacts, results: EventResults) -> None:
    made = _all_tables(facts, results)
    if flags["markdown"] is not None:
        flags["markdown"].write_text("\n".join([*facts.lines(), "", *map(markdown_table, made)]))
    encoded = msgspec.json.encode(facts._asdict() | as_plain(results))
    if str(flags["json_file"]) == "-":
        click.echo(encoded)
        return
    if flags["json_file"] is not None:
        flags["json_file"].write_bytes(encoded)
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    for table in made:
        console.print(rich_table(table))
    if not facts.is_full:
        console.print(_NOT_JUDGED)


if __name__ == "__main__":
    events()
