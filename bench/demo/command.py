"""`router demo`: the command."""

import sys

import click
from rich.console import Console

from bench.demo.demo import Demo, DemoStopped
from bench.demo.workload import WorkloadShape
from bench.processes import ProcessFailed
from kv_runtime.supervise import run_process


@click.command()
@click.option("--keep", is_flag=True, help="leave the fleet up afterwards, and print its addresses")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option("--seed", default=1, show_default=True, type=int, help="of the workload and of every draw")
def demo(keep: bool, workers: int, seed: int) -> None:
    """Show it: one workload through a real fleet twice, round-robin and kv."""
    show = Demo(Console(), workers=workers, shape=WorkloadShape(), seed=seed)
    try:
        run_process(lambda stop: show.run(stop, keep=keep))
    except (DemoStopped, ProcessFailed) as error:
        sys.exit(f"router demo: {error}")
