"""A headless Chromium on the page: what it shows, what its console says, and what axe finds in it."""

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright, expect

from tests.support.paths import ROOT
from tests.system.dashboards.picture import small

CHROMIUM = "/usr/bin/chromium"
"""Debian's package; `make browser` installs it."""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = ROOT / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
"""The checker, which `make browser` installs."""
WAIT_MS = 30_000
_PRESSES_MAX = 60
_BELOW_PX = 70
"""The time slider, and the space above it."""
_AXE_RULES = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter(each => ["serious", "critical"].includes(each.impact))
  .map(each => `${each.id}: ${each.nodes.map(node => node.target.join(" ")).slice(0, 3).join(", ")}`)"""


class Size(NamedTuple):
    """A screen, in CSS pixels; `scale`: device pixels in each."""

    name: str
    width: int
    height: int
    scale: float


PHONE, DESKTOP = Size("phone", 390, 844, 2), Size("desktop", 1600, 1000, 1)


class Screen:
    """The page in a browser. Every complaint of its console, and every dialog, is kept in `complaints`."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self._url = page, url
        self.complaints = list[str]()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text}")

    async def open(self, place: str = "fleet") -> None:
        """Load the page at a place, and return once it shows what it got."""
        await self.page.goto("about:blank")
        await self.page.goto(f"{self._url}/ui/#/{place}")

    async def shows(self, text: str) -> None:
        """Return once the text is in sight of a reader."""
        await expect(self.page.get_by_text(text).first).to_be_visible(timeout=WAIT_MS)

    async def is_live(self) -> None:
        """Return once the page follows the fleet."""
        await expect(self.page.locator(".status.live")).to_be_visible(timeout=WAIT_MS)

    async def press(self, *keys: str) -> None:
        """Press the keys, one after the other."""
        for key in keys:
            await self.page.keyboard.press(key)

    async def tab_to(self, selector: str) -> None:
        """Press Tab until what the selector names has the focus."""
        for _ in range(_PRESSES_MAX):
            if await self.page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
            await self.page.keyboard.press("Tab")
        raise AssertionError(f"{selector} has no focus after {_PRESSES_MAX} presses of Tab")

    async def picture(self) -> bytes:
        """Return a picture that ends where the page does."""
        end = await self.page.evaluate("document.querySelector('main').lastElementChild.getBoundingClientRect().bottom")
        size = self.page.viewport_size
        assert size is not None
        await self.page.set_viewport_size({"width": size["width"], "height": min(size["height"], int(end) + _BELOW_PX)})
        return small(io.BytesIO(await self.page.screenshot(animations="disabled")))

    async def faults(self) -> list[str]:
        """Return what axe calls serious or critical."""
        await self.page.evaluate(AXE.read_text())
        found: Sequence[Any] = await self.page.evaluate(_AXE_RULES)
        return [str(each) for each in found]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Yield a browser with a profile of its own."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def screen(
    browser: Browser, url: str, size: Size = DESKTOP, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[Screen]:
    """Yield the page on a screen; leaving the block fails if the console complained."""
    context: BrowserContext = await browser.new_context(
        viewport={"width": size.width, "height": size.height},
        device_scale_factor=size.scale,
        color_scheme=scheme,
        has_touch=size is PHONE,
    )
    context.set_default_timeout(WAIT_MS)
    shown = Screen(await context.new_page(), url)
    try:
        yield shown
        assert not shown.complaints, shown.complaints
    finally:
        await context.close()
