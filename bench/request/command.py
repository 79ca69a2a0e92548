"""`router bench request`: where the CPU time of one request goes."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.dataplane.command import cores
from bench.dataplane.systems import on_core
from bench.events.run import BenchFailed
from bench.index.report import commit, machine, markdown_table, rich_table
from bench.request.report import RequestFacts, as_json, tables
from bench.request.results import RequestResults
from bench.request.run import MeasuredAmount, RequestBench
from kv_runtime.process import run_process
from kv_runtime.supervise import until

_WIDTH = 200
"""Columns of a table that is not printed on a terminal."""
_QUICK = {"rounds": 1, "seconds": 0.3, "sample_s": 0.3, "events_s": 1.0}


@click.command("request", context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="turns of every request; medians are shown")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 60), default=2.0, help="how long a request is repeated in a round"
)
@click.option(
    "--sample", "sample_s", type=click.FloatRange(0.1, 300), default=15.0, help="seconds of sampling a column"
)
@click.option("--events", "events_s", type=click.FloatRange(0.5, 60), default=10.0, help="seconds of KV events")
@click.option("--blocks", "blocks_s", type=click.IntRange(100, 50_000), default=8_000, help="blocks a second in them")
@click.option("--perf", "uses_perf", is_flag=True, help="sample the process by `perf`, too: kernel, loop, interpreter")
@click.option("--quick", is_flag=True, help="one short round: does it run at all")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write everything measured")
@click.option("--markdown", type=click.Path(path_type=Path), help="write the tables, as docs/BENCHMARKS.md has them")
def request(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure where the CPU time of one request goes: by stage, by system call; and that of a chunk and of KV events.

    Routers are real processes with metrics, ledger and journal on, in modes kv and round-robin. System calls need
    `strace` on PATH. The exit status says whether the bench ran.
    """
    if flags["quick"]:
        flags |= _QUICK
    amount = MeasuredAmount(cores=cores(), **{name: flags[name] for name in MeasuredAmount._fields if name != "cores"})
    facts = RequestFacts(machine(), commit(), amount)
    found: list[RequestResults] = []
    try:
        with on_core(amount.cores[1]):
            run_process(lambda stop: until(stop, _measure(amount, found)))
    except* BenchFailed as group:
        raise click.ClickException("; ".join(map(str, group.exceptions))) from group
    if not found:
        raise click.Abort
    _write(flags, facts, found[0])


async def _measure(amount: MeasuredAmount, found: list[RequestResults]) -> None:
    async with RequestBench(amount) as bench:
        found.append(await bench.run(lambda name: click.echo(name, err=True)))


def _write(flags: dict[str, Any], facts: RequestFacts, results: RequestResults) -> None:
    made, lines = tables(results), list(facts.lines(results))
    if flags["markdown"] is not None:
        flags["markdown"].write_text("\n".join([*(f"* {line}" for line in lines), "", *map(markdown_table, made)]))
    if flags["json_file"] is not None:
        flags["json_file"].write_bytes(as_json(facts, results))
    for line in lines:
        click.echo(line)
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    for table in made:
        console.print(rich_table(table))


if __name__ == "__main__":
    request()
