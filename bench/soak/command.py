"""`router bench soak`: the command."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from bench.child import finished
from bench.soak.report import markdown
from bench.soak.run import SoakPlan, SoakRun
from bench.soak.verdicts import problems


@click.command("soak", context_settings={"show_default": True})
@click.option("--requests", type=click.IntRange(100, 1 << 32), default=10_000)
@click.option("--workers", type=click.IntRange(3, 64), default=8)
@click.option("--users", type=click.IntRange(1, 4096), default=64, help="each has one request at a time")
@click.option("--fault-every", type=click.IntRange(1, 1 << 32), default=4000, help="requests from fault to fault")
@click.option("--seed", type=int, default=1, help="of the requests and of the faults")
@click.option(
    "--programs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(sys.executable).parent,
    help="folder of the commands router, worker-agent and indexer",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="write the report there, too")
@click.pass_context
def soak(context: click.Context, /, out: Path | None, **plan: Any) -> None:  # noqa: ANN401 - as `SoakPlan` has them
    """Send many requests through real processes while faults happen, and print what became of them.

    Exit code 1 where a request was lost, a process grew, or the index differs from what workers hold.
    """
    began_s = time.perf_counter()
    found = finished(SoakRun(SoakPlan(**plan), click.echo).run())
    wrong = problems(found)
    text = markdown(found, wrong, time.perf_counter() - began_s)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    context.exit(1 if wrong else 0)
