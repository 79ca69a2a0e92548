"""`router top`: a running fleet on one screen, over a router's control plane.

exit code   0 the screen was printed     2 not: a wrong flag, no answer, or stopped
"""

import click

from kv_runtime.clock import SystemClock
from kv_runtime.process import print_lines
from router.cli.options import ControlPages, NothingRead, asked, with_source
from router.cli.screen import DECISIONS, Decisions, Labels, Metrics, Snapshot, Workers, screen
from router.config import RouterSettings
from router.processes.metrics import parsed


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 60),
    default=2.0,
    show_default=True,
    help="seconds between two looks",
)
@with_source
def top(*, settings: RouterSettings, url: str, interval_s: float) -> None:
    """Print a running fleet: workers, latencies, the last decisions. `watch router top` shows it again and again.

    Without --router the configured control plane is asked: by default 127.0.0.1, port 8001.

    \b
    Example:  router top --router http://127.0.0.1:8001
    """  # noqa: D301

    async def looked(plane: ControlPages) -> list[str]:
        clock = SystemClock()
        before, before_s = await _metrics(plane), clock.now()
        await clock.sleep(interval_s)
        metrics, passed_s = await _metrics(plane), clock.now() - before_s
        workers = sorted((await plane.page("/v1/workers", Workers)).workers, key=lambda each: each.worker_id)
        decisions = (await plane.page(f"/v1/decisions?limit={DECISIONS}", Decisions)).decisions
        return screen(Snapshot(plane.url, tuple(workers), tuple(decisions), metrics, before, passed_s))

    print_lines(*asked(settings, url, looked))


async def _metrics(plane: ControlPages) -> Metrics:
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in parsed((await plane.body("/metrics")).decode()):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError as error:
        raise NothingRead(f"--router: found no metrics of a router at {plane.url}: {error}") from error
    return Metrics(samples)
