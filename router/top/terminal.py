"""The screens of `router top` in a terminal: draws them, and takes the keys."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from router.doctor.http_client import HttpAsker
from router.top.keys import State, keys, pressed
from router.top.reader import FleetReader
from router.top.screens import Line, screen

_READ_BYTES = 1024


class Screen:
    """The terminal: what is shown now, and the keys that change it."""

    def __init__(self, reader: FleetReader, live: Live) -> None:
        self._reader, self._live = reader, live
        self._state = State()
        self._wake = asyncio.Event()

    def type(self, data: bytes) -> None:
        """Bytes came from the keyboard; empty: it is gone."""
        before = self._state
        for key in keys(data) if data else ["q"]:
            self._state = pressed(self._state, key, self._reader.snapshot)
        if self._state.of != before.of:
            self._reader.forget_explanation()
        if self._state.of != before.of or self._state.is_over:
            self._wake.set()
        self.draw()

    def draw(self) -> None:
        """Show the present state."""
        size = self._live.console.size
        lines = screen(self._reader.snapshot, self._state, width=size.width, height=size.height)
        self._live.update(as_text(lines), refresh=True)

    async def keep_up(self, interval_s: float) -> None:
        """Read and draw every `interval_s` seconds, and when a decision is opened, until a key ends it."""
        while not self._state.is_over:
            self._wake.clear()
            await self._reader.read(self._state.of if self._state.view == "decision" else "")
            self.draw()
            try:
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue


def as_text(lines: list[Line]) -> Text:
    """Return the lines for rich: their text is never read as markup."""
    text = Text(no_wrap=True, overflow="crop", end="")
    for number, line in enumerate(lines):
        text.append(("\n" if number else "") + line.text, line.style)
    return text


async def show(stop: asyncio.Event, asker: HttpAsker, clock: Clock, url: str, token: str, interval_s: float) -> None:
    """Show the fleet in this terminal until `q` is typed or `stop` is set; the terminal is then as it was."""
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    reader = FleetReader(asker, clock, url, token)
    with _every_key(keyboard), Live(console=Console(), screen=True, auto_refresh=False) as live:
        shown = Screen(reader, live)
        shown.draw()
        loop.add_reader(keyboard, lambda: shown.type(os.read(keyboard, _READ_BYTES)))
        try:
            await until(stop, shown.keep_up(interval_s))
        finally:
            loop.remove_reader(keyboard)


@contextmanager
def _every_key(keyboard: int) -> Iterator[None]:
    """Have every key at once and without an echo; Ctrl-C still interrupts."""
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
