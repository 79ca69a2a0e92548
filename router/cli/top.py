"""`router top`: a running fleet on one screen, over a router's control plane.

exit code   0 the screen was printed     1 no answer, or stopped     2 a wrong flag
"""

import sys
from pathlib import Path

import aiohttp
import click

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.process import Stopped, print_lines, run_to_end
from router.cli.options import plane_of
from router.config import RouterSettings
from router.doctor.http_client import HttpAsker
from router.top.reader import FleetReader, NotAnswered
from router.top.screens import screen

_TIMEOUT_S = 5.0
_WRONG = 2


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
            reader = FleetReader(HttpAsker(session, _TIMEOUT_S), clock, address, secret)
            await reader.read()
            await clock.sleep(interval_s)
            return screen(await reader.read())

    try:
        print_lines(*run_to_end(looked))
    except Stopped:
        sys.exit(1)
    except NotAnswered as error:
        print_lines(f"router: {address}: {error}", err=True)
        sys.exit(1)
