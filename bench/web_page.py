"""`router bench web-page`: how soon the web page shows a large fleet, and follows its time slider, in a real Chromium.

The page of a small fleet is measured in the same run: it is what browser and machine need for any page. Both are
served by the control plane of `router bench fleet-views` in a process of its own. A step of the slider lasts from the
slider's event to the first frame after the fleet and the decisions of that time are drawn.
"""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import click

from bench.fleet_views import Process
from bench.report import machine_line, percentile
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.journal import WorkerHeard
from kv_runtime.clock import SystemClock

FIRST_PAINT_MS, STEP_MS = 1000.0, 200.0
"""The targets, of the median."""
SMALL_RANKS, SMALL_BLOCKS = 8, 8000
_SECONDS_KEPT = 25.0
"""Of the fleet's past, before the page is opened."""
_WAIT_MS = 60_000
_SINCE_OPENED = "() => performance.now()"
_FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
_STEP = """() => new Promise((resolve) => {
  const slider = document.querySelector("input[type=range]");
  const shown = () => document.querySelector("output.time").textContent;
  const before = shown(), began = performance.now();
  const drawn = () => shown() !== before && !document.querySelector("main[aria-busy]");
  const end = () => resolve(performance.now() - began);
  const frame = () => requestAnimationFrame(drawn() ? end : frame);
  slider.stepDown();
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  requestAnimationFrame(frame);
})"""


class Shown(NamedTuple):
    """One fleet, milliseconds, each a series: first paint and ranks in sight since the address was opened, steps."""

    ranks: int
    blocks: int
    first_paint_ms: list[float]
    ranks_ms: list[float]
    prefixes_ms: list[float]
    steps_ms: list[float]


class Asked(NamedTuple):
    """How often the page is opened, and how many steps its slider makes."""

    openings: int
    steps: int


async def measure(ranks: int, blocks: int, seed: int, asked: Asked) -> Shown:
    """Return how one fleet was shown."""
    here, there = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=serve, args=(there, ranks, blocks, seed), daemon=True)
    server.start()
    url, held = await asyncio.to_thread(here.recv)
    try:
        return await _look(url, Shown(ranks, held, [], [], [], []), asked)
    finally:
        here.send("end")
        server.join()


async def _look(url: str, found: Shown, asked: Asked) -> Shown:
    from bench.browser import chromium  # noqa: PLC0415 - of a package that no extra for users has

    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        for _ in range(asked.openings):
            for place, row_ms in (("prefixes", found.prefixes_ms), ("fleet", found.ranks_ms)):
                await page.goto("about:blank")
                await page.goto(f"{url}/ui/#/{place}")
                await page.wait_for_selector("main [aria-rowindex='2']", timeout=_WAIT_MS)
                row_ms.append(await page.evaluate(_SINCE_OPENED))
            found.first_paint_ms.append(await page.evaluate(_FIRST_PAINT))
        await page.wait_for_selector("input[type=range]", timeout=_WAIT_MS)
        for _ in range(asked.steps):
            found.steps_ms.append(await page.evaluate(_STEP))
    return found


def serve(told: Connection, ranks: int, blocks: int, seed: int) -> None:
    """Serve the control plane of a fleet until the other end of the pipe speaks."""
    asyncio.run(_serve(told, Process(ranks, blocks, seed)))


async def _serve(told: Connection, process: Process) -> None:
    stop = asyncio.Event()
    await process.server.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(process.live.run(stop))
        group.create_task(process.server.run(stop))
        beating = group.create_task(_beat(process))
        await asyncio.sleep(_SECONDS_KEPT)
        told.send((f"http://127.0.0.1:{process.server.port}", process.fold.block_count()))
        await asyncio.to_thread(told.recv)
        beating.cancel()
        stop.set()


async def _beat(process: Process) -> None:
    """Let the fleet's clock show the time of day, and every worker be heard."""
    fleet, clock = process.fleet, SystemClock()
    while True:
        now_s = fleet.clock.now_s = clock.wall_ns() / 1e9
        for known in (worker.registration for worker in fleet.state.fleet.workers()):
            fleet.routing.apply(WorkerHeard(now_s=now_s, worker_id=known.worker_id, instance=known.instance))
        await clock.sleep(HEARTBEAT_PERIOD_S)


def lines(small: Shown, large: Shown) -> Iterator[str]:
    """Yield the figures as a Markdown table, and each target as a line."""
    yield (
        "| what | "
        + " | ".join(f"{each.ranks:,} ranks, {each.blocks:,} blocks" for each in (small, large))
        + " | ratio |"
    )
    yield "|---|---|---|---:|"
    for name, field in (
        ("first paint", "first_paint_ms"),
        ("ranks in sight", "ranks_ms"),
        ("prefixes in sight", "prefixes_ms"),
        ("a step of the slider", "steps_ms"),
    ):
        few, many = (list[float](getattr(each, field)) for each in (small, large))
        ratio = percentile(many, 0.5) / percentile(few, 0.5)
        yield f"| {name}, ms, p50 (longest) | {_spread(few)} | {_spread(many)} | {ratio:.1f}x |"
    yield ""
    for name, series, target in (
        ("first paint", large.first_paint_ms, FIRST_PAINT_MS),
        ("a step of the slider", large.steps_ms, STEP_MS),
    ):
        p50 = percentile(series, 0.5)
        yield f"{name}: {p50:.0f} ms, target {target:.0f} ms: {'reached' if p50 <= target else 'missed'}"


def _spread(series: list[float]) -> str:
    return f"{percentile(series, 0.5):.0f} ({max(series):.0f})"


@click.command()
@click.option("--ranks", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--blocks", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option(
    "--openings", type=click.IntRange(min=1), default=5, show_default=True, help="how often the page is opened"
)
@click.option("--steps", type=click.IntRange(min=1, max=20), default=20, show_default=True, help="of the slider")
@click.option("--seed", default=1, show_default=True)
def web_page(ranks: int, blocks: int, openings: int, steps: int, seed: int) -> None:
    """Measure the web page of a large fleet in a browser, beside that of a small one."""
    if find_spec("playwright") is None:
        raise click.UsageError("the package playwright is missing: pip install playwright; make browser")
    asked = Asked(openings, steps)
    small = asyncio.run(measure(SMALL_RANKS, SMALL_BLOCKS, seed, asked))
    large = asyncio.run(measure(ranks, blocks, seed, asked))
    for line in lines(small, large):
        click.echo(line)
    click.echo(f"\nseed {seed}. {machine_line()}")
