"""`router top`: a running fleet in this terminal, over a router's control plane.

exit code   0 ended by q or a signal; --once: the screen was printed     1 --once: no answer     2 a wrong flag
"""

import asyncio
import sys
from pathlib import Path

import aiohttp
import click

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.extras import require
from kv_runtime.process import print_lines, run_process
from kv_runtime.supervise import until
from router.cli.options import plane_of
from router.config import RouterSettings
from router.doctor.http_client import HttpAsker
from router.top.reader import FleetReader
from router.top.screens import page

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
@click.option("--once", is_flag=True, help="print one plain screen after one interval, and end")
def top(*, file: Path | None, url: str, token: str | None, interval_s: float, once: bool) -> None:
    """Watch a running fleet in this terminal: workers, latencies, decisions.

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
    if once:
        sys.exit(_print_once(address, secret, interval_s))
    require("top", "router", "top")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        click.echo("router: top needs a terminal; --once prints one plain screen", err=True)
        sys.exit(_WRONG)
    _show(address, secret, interval_s)


def _print_once(url: str, token: str, interval_s: float) -> int:
    found: list[FleetReader] = []

    async def main(stop: asyncio.Event) -> None:
        clock = SystemClock()
        async with aiohttp.ClientSession() as session:
            reader = FleetReader(HttpAsker(session, _TIMEOUT_S), clock, url, token)
            await until(stop, reader.read())
            if not reader.snapshot.problem:
                await clock.wait(stop, interval_s)
                await until(stop, reader.read())
            found.append(reader)

    run_process(main)
    (reader,) = found
    print_lines(*(line.text for line in page(reader.snapshot)))
    return 1 if reader.snapshot.problem else 0


def _show(url: str, token: str, interval_s: float) -> None:
    from router.top.terminal import show  # noqa: PLC0415 - rich, of an extra

    async def main(stop: asyncio.Event) -> None:
        clock = SystemClock()
        async with aiohttp.ClientSession() as session:
            await show(stop, HttpAsker(session, _TIMEOUT_S), clock, url, token, interval_s)

    run_process(main)
