"""`router demo`: the command."""

import shutil
import sys

import click
from rich.console import Console

from bench.demo.demo import Demo, DemoStopped
from bench.demo.monitoring import ALERTMANAGER, PROMETHEUS, ProgramMissing, program
from bench.demo.workload import WorkloadShape
from bench.processes import ProcessFailed
from kv_runtime.process import run_process


@click.command()
@click.option("--keep", is_flag=True, help="leave the fleet up afterwards, and print its addresses")
@click.option(
    "--observe", is_flag=True, help="like --keep, with requests, Prometheus and Alertmanager (installed ones)"
)
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option("--seed", default=1, show_default=True, type=int, help="of the workload and of every draw")
def demo(keep: bool, observe: bool, workers: int, seed: int) -> None:
    """Show it: one workload through a real fleet twice, round-robin and kv."""
    if observe:
        _find_programs()
    program = "router" if shutil.which("router") else sys.argv[0]
    show = Demo(Console(), program=program, workers=workers, shape=WorkloadShape(), seed=seed)
    try:
        run_process(lambda stop: show.run(stop, keep=keep, observe=observe))
    except (DemoStopped, ProcessFailed) as error:
        sys.exit(f"router demo: {error}")


def _find_programs() -> None:
    """Fail now, not after the table was printed."""
    try:
        for each in (PROMETHEUS, ALERTMANAGER):
            program(each)
    except ProgramMissing as error:
        sys.exit(f"router demo: {error}")
