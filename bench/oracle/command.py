"""`router bench oracle`, or `python -m bench.oracle.command`: our choice beside the peer's real one, flip by flip."""

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.index.command import PEER_PYTHON
from bench.index.report import machine, markdown_table, rich_table
from bench.oracle.grid import BY_DESIGN, Flip, OracleCell, grid
from bench.oracle.ours import our_flip
from bench.oracle.report import OracleComparison, as_json, by_design, compared, recording, tables
from bench.oracle.run import PeerAbsent, PeerFailed, PeerProcess, peer_flips

_WIDTH = 200
"""Columns of a table that is not printed on a terminal."""
_DIFFERENT, _ABSENT = 1, 2
"""Exit codes."""


@click.command("oracle", context_settings={"show_default": True})
@click.option("--peer-python", envvar=PEER_PYTHON, help=f"an interpreter with ai-dynamo-runtime; also ${PEER_PYTHON}")
@click.option("--quick", is_flag=True, help="a small grid: does it run at all")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write every cell with both flips")
@click.option("--markdown", type=click.Path(path_type=Path), help="write the tables, as docs/BENCHMARKS.md has them")
@click.option("--record", type=click.Path(path_type=Path), help="write the peer's flips, as tests/golden/ keeps them")
def oracle(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Ask the peer's selection service and our decision at which extra load the choice flips, over a grid.

    Of two ranks one holds more of a prompt; it is loaded more and more until the other wins. The grid: what is held on
    which tier, how the load is made, and the weights of all terms, history off. The peer is ai-dynamo-runtime's own
    SelectionService in a process of its own, fed by sockets as an engine would. Exit status: 0 all flips are equal, 1
    some differ, 2 the peer cannot be asked.
    """
    cells = list(grid(is_small=flags["quick"]))
    try:
        with PeerProcess(flags["peer_python"] or sys.executable) as process:
            peer = f"ai-dynamo-runtime {process.version}"
            theirs = _peer_flips(process, [*cells, *(cell for _, cell in BY_DESIGN)])
    except PeerAbsent as error:
        click.echo(f"peer absent ({error}): nothing was compared", err=True)
        sys.exit(_ABSENT)
    except PeerFailed as error:
        raise click.ClickException(str(error)) from error
    ours = {cell.name: our_flip(cell) for cell in [*cells, *(cell for _, cell in BY_DESIGN)]}
    comparison = OracleComparison(machine(), peer, compared(theirs, ours, cells), by_design(theirs, ours))
    _write(comparison, flags["json_file"], flags["markdown"])
    if flags["record"] is not None:
        flags["record"].write_bytes(recording(peer, theirs))
    sys.exit(_DIFFERENT if comparison.different else 0)


def _peer_flips(process: PeerProcess, cells: list[OracleCell]) -> dict[str, Flip]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("", total=len(cells))
        return peer_flips(process, cells, lambda cell: progress.update(task, advance=1, description=cell.weights.name))


def _write(comparison: OracleComparison, json_file: Path | None, markdown: Path | None) -> None:
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    for table in tables(comparison):
        console.print(rich_table(table))
    for line in comparison.lines():
        click.echo(line)
    if json_file is not None:
        json_file.write_bytes(as_json(comparison))
    if markdown is not None:
        lines = [f"* {line}" for line in comparison.lines()]
        markdown.write_text("\n".join([*lines, "", *(markdown_table(table) for table in tables(comparison))]))


if __name__ == "__main__":
    oracle()
