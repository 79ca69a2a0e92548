"""The web page in a real browser, on a real router with simulated workers under requests.

`make figures` draws docs/figures/web_*.png with it.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from bench.processes import FleetShape
from kv_runtime.clock import Clock
from tests.support.paths import ROOT
from tests.support.processes import running_router
from tests.system.faults.fleet import QUIET, WORKER, Fleet, fleet
from tests.system.faults.traffic import MODEL, Traffic, TrafficShape
from tests.system.web.browser import DESKTOP, PHONE, WAIT_MS, Size, chromium, screen
from tests.unit.router.samples import registered

expect.set_options(timeout=WAIT_MS)
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PLACES = (
    "fleet",
    "prefixes",
    "decisions",
    "accuracy",
    "savings",
    "log",
    "workers/w0",
    "decisions/{decision}",
    "nothing",
)
HOSTILE = "<img src=x onerror=document.title='executed'>"
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=lambda size: size.name)
_REQUESTS = TrafficShape(requests_per_s=8.0, system_blocks=24, question_blocks=(3, 40))
_SHAPE = FleetShape(
    workers=3,
    nats_servers=1,
    worker_settings=(
        *(*WORKER, "engine.dp_ranks=4", "engine.total_kv_blocks=1024"),
        *("engine.max_seq_len=4096", "engine.speed=4"),
    ),
    router_settings=(
        *QUIET,
        *("tracing.link=https://traces.example/{request_id}", "journal.decisions_max=50000"),
        *("control.keep_text=true", "queue.fair_share_by=x-tenant-id"),
    ),
)

_SAMPLES = 6
"""Of the fleet, that the router keeps."""


class Watched(NamedTuple):
    """A browser, and the fleet under requests that it looks at."""

    browser: Browser
    fleet: Fleet
    sent: Traffic

    @property
    def url(self) -> str:
        return self.fleet.urls["router"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def watched() -> AsyncIterator[Watched]:
    async with AsyncExitStack() as cleanup:
        running = await cleanup.enter_async_context(fleet(_SHAPE, _REQUESTS))
        sent = await cleanup.enter_async_context(running.traffic())
        await sent.more(40)
        await until_past(running)
        yield Watched(await cleanup.enter_async_context(chromium()), running, sent)


async def register_hostile(running: Fleet) -> None:
    """A worker registers whose model is markup."""
    body = msgspec.json.encode(registered("hostile", model=HOSTILE, base_url="http://127.0.0.1:1"))
    async with running.session.post(f"{running.urls['router']}/v1/workers", data=body) as response:
        assert response.status == 202, await response.text()


async def until_past(running: Fleet) -> None:
    """Return once the router recorded some seconds of the fleet with all workers."""
    async with asyncio.timeout(60):
        while True:
            async with running.session.get(f"{running.urls['router']}/v1/history") as response:
                ring = (await response.json())["ring"]
            if ring["samples"] >= _SAMPLES:
                return
            await Clock().sleep(0.5)


async def newest_decision(running: Fleet) -> str:
    """Return a decision of the newest that has ended, that with the largest margin."""
    async with running.session.get(f"{running.urls['router']}/v1/decisions?limit=50") as response:
        rows = (await response.json())["decisions"]
    ended = [row for row in rows if row["outcome"] is not None]
    return str(max(ended, key=lambda row: float(row["margin"] or 0))["decision_id"])


@SIZES
async def test_by_keyboard_a_worker_and_a_decision_are_opened(watched: Watched, size: Size) -> None:
    async with screen(watched.browser, watched.url, size) as shown:
        page = shown.page
        await shown.open()
        await shown.is_live()
        await shown.tab_to("[role=grid]")
        await shown.press("Home", "ArrowDown", "ArrowUp", "Enter")
        await expect(page.locator("main > h2")).to_have_text("w0")
        await page.go_back()
        await shown.tab_to("[role=grid]")
        await shown.press("End", "Enter")
        await expect(page.locator("main > h2")).to_have_text("w2")
        await shown.tab_to("[role=grid][aria-label^=Decisions]")
        await shown.press("Home", "Enter")
        await expect(page.locator(".sentence")).to_contain_text(" went to w2/")
        await page.go_back()
        await expect(page.locator("#title")).to_be_focused()
        await page.reload()
        await shown.tab_to('a[href="#/decisions"]')
        await shown.press("Enter")
        await expect(page.locator("#title")).to_have_text("Decisions")
        await shown.tab_to("#decisions-filter")
        await page.keyboard.type("w1/")
        await shown.tab_to("[role=grid]")
        await shown.press("ArrowDown", "Enter")
        await expect(page.locator(".sentence")).to_contain_text(" went to w1/")
        await expect(page.get_by_role("grid", name="Candidates").get_by_role("row")).to_have_count(13)
        await expect(page.locator(".tr.winner")).to_contain_text("chosen")


@SIZES
async def test_by_keyboard_the_tree_is_explored_and_the_slider_moved(watched: Watched, size: Size) -> None:
    async with screen(watched.browser, watched.url, size) as shown:
        page = shown.page
        await shown.open()
        await shown.is_live()
        await shown.tab_to('a[href="#/prefixes"]')
        await shown.press("Enter")
        prefixes = page.get_by_role("grid", name="Prefixes")
        await expect(prefixes.get_by_role("row").nth(1)).to_contain_text("▸")
        await shown.tab_to("[role=grid]")
        await shown.press("Home", "Enter")
        await expect(page.locator(".crumbs [aria-current]")).to_be_visible()
        await shown.tab_to("[role=grid]")
        await shown.press("Home")
        await expect(prefixes.locator('[aria-selected="true"]')).to_be_visible()
        await expect(page.locator("aside [role=row]").nth(1)).to_contain_text("/")
        await expect(page.locator("aside")).to_contain_text("tenant-")
        await expect(page.locator("aside pre")).to_have_text(re.compile(r"\d+ [a-z ]+"))
        await page.go_back()
        await expect(page.locator(".crumbs")).to_have_count(0)
        await page.goto(f"{watched.url}/ui/#/fleet")
        await shown.tab_to("input[type=range]")
        await shown.press(*["ArrowLeft"] * 6)
        await expect(page.locator(".status.past")).to_be_visible()
        await expect(page.locator("main[aria-busy]")).to_have_count(0)
        await expect(page.locator(".message")).to_have_count(0)
        await expect(page.get_by_role("grid").get_by_role("row")).to_have_count(13)
        await page.go_back()
        await expect(page.get_by_text("The tree of the past is not kept.")).to_be_visible()
        await expect(prefixes).to_have_count(0)
        await shown.tab_to(".timeline button")
        await shown.press("Enter")
        await shown.is_live()


async def test_the_last_15_minutes_are_drawn_and_an_address_leads_to_a_moment(watched: Watched) -> None:
    async with screen(watched.browser, watched.url) as shown:
        await shown.open()
        await shown.is_live()
        await expect(shown.page.locator(".trends svg path[d^=M]")).to_have_count(6)
        await expect(shown.page.locator(".headline")).to_contain_text("of it by routing")
        await shown.tab_to("input[type=range]")
        await shown.press(*["ArrowLeft"] * 6)
        await expect(shown.page.locator(".status.past")).to_be_visible()
        place = shown.page.url.split("#/")[1]
    async with screen(watched.browser, watched.url) as shown:
        await shown.open(place)
        await expect(shown.page.locator(".status.past")).to_be_visible()
        await expect(shown.page.locator(".trends .moment")).to_have_count(5)
        await shown.tab_to(".timeline button")
        await shown.press("Enter")
        await shown.is_live()
        assert shown.page.url.endswith("#/fleet")


async def test_of_a_moment_before_the_15_minutes_that_are_kept_no_figures_are_drawn(watched: Watched) -> None:
    async with screen(watched.browser, watched.url) as shown:
        none = {"step_s": 5, "ttft_bounds_s": [], "rows": []}
        await shown.page.route("**/v1/trends", lambda route: route.fulfill(json=none))
        await shown.open()
        await shown.is_live()
        await shown.tab_to("input[type=range]")
        await shown.press("ArrowLeft")
        await expect(shown.page.locator(".status.past")).to_be_visible()
        await expect(shown.page.get_by_text("Rates and latencies are kept for 15 minutes")).to_be_visible()
        await expect(shown.page.locator(".trends")).to_have_count(0)


@SIZES
async def test_a_decision_has_its_sentence_its_outcome_beside_the_prediction_every_candidate_and_its_trace(
    watched: Watched, size: Size
) -> None:
    decision_id = await newest_decision(watched.fleet)
    async with watched.fleet.session.get(f"{watched.url}/v1/decisions/{decision_id}") as response:
        found = await response.json()
    async with screen(watched.browser, watched.url, size) as shown:
        await shown.open(f"decisions/{decision_id}")
        await shown.shows(found["sentence"])
        for term in ("wait", "prefill", "lateness", "stall", "decode", "slowdown"):
            await expect(shown.page.get_by_role("columnheader", name=term)).to_have_count(1)
        for candidate in found["decision"]["candidates"]:
            row = shown.page.get_by_role("row").filter(has_text=f"{candidate['worker_id']}/{candidate['dp_rank']}")
            await expect(row.first).to_contain_text(f"{candidate['terms']['cost']:.1f}")
        measured = shown.page.get_by_role("row", name="Cached tokens")
        await expect(measured).to_contain_text("".join(str(found["outcome"]["cached_tokens"]).split())[-3:])
        link = shown.page.get_by_role("link", name="Open its trace")
        assert await link.get_attribute("href") == f"https://traces.example/{found['decision']['request_id']}"


@pytest.mark.parametrize(
    ("name", "place", "size", "scheme"),
    [
        ("web_fleet", "fleet", DESKTOP, "light"),
        ("web_worker", "workers/w0", DESKTOP, "light"),
        ("web_prefixes", "prefixes", DESKTOP, "light"),
        ("web_decisions", "decisions", DESKTOP, "dark"),
        ("web_decision", "decisions/{decision}", DESKTOP, "light"),
        ("web_accuracy", "accuracy", DESKTOP, "light"),
        ("web_savings", "savings", DESKTOP, "light"),
        ("web_log", "log", DESKTOP, "light"),
        ("web_phone_fleet", "fleet", PHONE, "dark"),
    ],
)
async def test_every_picture_is_drawn(
    watched: Watched, name: str, place: str, size: Size, scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    directory = Path(os.environ.get("KVROUTER_FIGURES", tmp_path))
    async with screen(watched.browser, watched.url, size, scheme) as shown:
        await shown.open(place.format(decision=await newest_decision(watched.fleet)))
        await shown.is_live()
        await expect(shown.page.get_by_text("Reading")).to_have_count(0)
        if place == "prefixes":
            await shown.page.get_by_role("grid").first.focus()
            await shown.press("Home")
        await watched.sent.more(5)
        (directory / f"{name}.png").write_bytes(await shown.picture())
    assert (ROOT / "docs" / "figures" / f"{name}.png").exists()


async def test_hostile_names_are_text(watched: Watched) -> None:
    await register_hostile(watched.fleet)
    headers = {"x-request-id": "r-<script>document.title=1</script>"}
    body = {"model": MODEL, "prompt": HOSTILE, "max_tokens": 2}
    async with watched.fleet.session.post(
        f"{watched.fleet.data_url}/v1/completions", json=body, headers=headers
    ) as response:
        given = response.headers["x-decision-id"]
    async with screen(watched.browser, watched.url) as shown:
        for place, text in (
            ("fleet", HOSTILE),
            ("workers/hostile", HOSTILE),
            (f"decisions/{given}", MODEL),
            ("workers/%3Cimg%20src=x%20onerror=alert(1)%3E", "There is no worker <img src=x onerror=alert(1)>."),
            ("prefixes/%3Csvg%20onload=alert(1)%3E", "<svg onload=alert(1)>"),
            ("decisions/%3Csvg%20onload=alert(1)%3E", "<svg onload=alert(1)>"),
        ):
            await shown.open(place)
            await shown.shows(text)
            assert await shown.page.locator("#page :is(img, script, [onload], [onerror])").count() == 0
            assert "executed" not in await shown.page.title()
        await shown.open(f"decisions/{given}")
        await shown.page.locator("summary", has_text="Prompt").click()
        await expect(shown.page.locator("pre")).to_have_text(HOSTILE)
        assert await shown.page.locator("#page img").count() == 0
        shown.complaints[:] = [each for each in shown.complaints if "status of 40" not in each]  # of the unknown ids


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
async def test_axe_finds_no_serious_fault(watched: Watched, size: Size, scheme: Literal["light", "dark"]) -> None:
    decision = await newest_decision(watched.fleet)
    async with screen(watched.browser, watched.url, size, scheme) as shown:
        for place in PLACES:
            await shown.open(place.format(decision=decision))
            await shown.is_live()
            await expect(shown.page.get_by_text("Reading")).to_have_count(0)
            assert await shown.faults() == [], place
            width = await shown.page.evaluate("document.documentElement.scrollWidth")
            assert width <= size.width, f"{place} is wider than the screen"


async def test_a_planted_fault_is_found_by_axe(watched: Watched) -> None:
    async with screen(watched.browser, watched.url) as shown:
        await shown.open()
        await shown.is_live()
        await shown.page.evaluate("document.body.append(document.createElement('input'))")  # no update draws over it
        assert any("label" in each for each in await shown.faults())


async def test_a_page_whose_router_is_restarted_says_so_and_goes_on(watched: Watched) -> None:
    async with screen(watched.browser, watched.url) as shown:
        await shown.open()
        await shown.is_live()
        await watched.fleet.stop("router")
        await shown.shows("The page tries again each second.")
        await watched.fleet.start_again("router")
        await shown.is_live()
        shown.complaints.clear()  # the browser reports each refused connection


async def test_the_page_asks_for_the_token_and_keeps_it_in_its_tab() -> None:
    settings = ("--set", "nats.port=0", "--set", "control.token=a-token")
    async with (
        running_router(*settings) as router,
        chromium() as browser,
        screen(browser, router.control_url) as shown,
    ):
        await shown.open()
        await shown.page.get_by_label("Token").fill("another")
        await shown.press("Enter")
        await shown.shows("The token is not this control plane's.")
        await shown.page.get_by_label("Token").fill("a-token")
        await shown.press("Enter")
        await shown.is_live()
        await shown.shows("There is no worker.")
        assert "a-token" not in shown.page.url
        assert await shown.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
            0,
            1,
            "",
        ]
        shown.complaints[:] = [each for each in shown.complaints if "status of 401" not in each]
