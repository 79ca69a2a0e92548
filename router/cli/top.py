"""`router top`: a running fleet on one screen, over a router's control plane.

exit code   0 the screen was printed     1 no answer, or stopped     2 a wrong flag
"""

import sys
from pathlib import Path

import aiohttp
import click

from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.process import Stopped, print_lines, run_to_end
from router.cli.options import plane_of
from router.config import RouterSettings
from router.doctor.pages import HttpAsker
from router.processes.metrics import parsed
from router.top.pages import DECISIONS, Labels, Metrics, Snapshot, decisions_of, workers_of
from router.top.screens import screen

_TIMEOUT_S = 5.0
_WRONG = 2
_UNAUTHORIZED = 401


class _NotAnswered(Exception):
    """The control plane did not answer as one does; the message says why."""


class _FleetReader:
    """Snapshots of one router, each after the last."""

    def __init__(self, asker: HttpAsker, clock: Clock, url: str, token: str) -> None:
        self._asker, self._clock, self._url, self._token = asker, clock, url, token
        self._read_s = 0.0
        self._before: Metrics | None = None

    async def read(self) -> Snapshot:
        """Return the next snapshot; raise `_NotAnswered`."""
        try:
            workers = workers_of(await self._get("/v1/workers")).workers
            decisions = decisions_of(await self._get(f"/v1/decisions?limit={DECISIONS}")).decisions
            metrics = _metrics(await self._get("/metrics"))
        except (*UNDECODABLE, ValueError) as error:
            raise _NotAnswered(f"this is no answer of a router's control plane: {error}") from error
        passed_s, self._read_s = self._clock.now() - self._read_s, self._clock.now()
        before, self._before = self._before, metrics
        workers.sort(key=lambda each: each.worker_id)
        return Snapshot(self._url, tuple(workers), tuple(decisions), metrics, before, passed_s)

    async def _get(self, path: str) -> bytes:
        reply = await self._asker.get(f"{self._url}{path}", self._token)
        if reply.status == _UNAUTHORIZED:
            raise _NotAnswered("401: the token is missing or wrong (--token, KVROUTER_CONTROL__TOKEN)")
        if not reply.is_ok:
            raise _NotAnswered(reply.problem or f"{path} answered {reply.status}")
        return reply.body


def _metrics(body: bytes) -> Metrics:
    samples: dict[str, dict[Labels, float]] = {}
    for family in parsed(body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Metrics(samples)


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="the router's own YAML file")
@click.option("--router", "url", default="", help="the router's control plane, http://host:port")
@click.option("--token", help="the control plane's bearer token; better by KVROUTER_CONTROL__TOKEN")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 60),
    default=2.0,
    show_default=True,
    help="seconds between two looks",
)
def top(*, file: Path | None, url: str, token: str | None, interval_s: float) -> None:
    """Print a running fleet: workers, latencies, the last decisions. `watch router top` shows it again and again.

    Without --router the configured control plane is asked: by default 127.0.0.1, port 8001.

    \b
    Example:  router top --router http://127.0.0.1:8001
    """  # noqa: D301
    try:
        settings = load_settings(RouterSettings, file=file, assignments=(), flags={"control.token": token})
        address, secret = plane_of(settings, url)
    except ConfigurationError as error:
        print_lines(*f"router: {error}".split("\n"), err=True)
        sys.exit(_WRONG)

    async def looked() -> list[str]:
        clock = SystemClock()
        async with aiohttp.ClientSession() as session:
            reader = _FleetReader(HttpAsker(session, _TIMEOUT_S), clock, address, secret)
            await reader.read()
            await clock.sleep(interval_s)
            return screen(await reader.read())

    try:
        print_lines(*run_to_end(looked))
    except Stopped:
        sys.exit(1)
    except _NotAnswered as error:
        print_lines(f"router: {address}: {error}", err=True)
        sys.exit(1)
