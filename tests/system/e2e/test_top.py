"""`router top` as it is typed, on a real router with simulated workers, in a terminal of 80 by 24."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.ports import free_ports
from bench.processes import FleetProcesses
from tests.system.e2e.client import Client
from tests.system.e2e.typed import typed

ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
WAIT_S = 60.0


class Terminal:
    """A terminal's other side: what the program wrote since the last key, without the escape sequences."""

    def __init__(self, process: asyncio.subprocess.Process, side: int) -> None:
        self.process, self._side = process, side
        self._written = b""
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(side, self._read)

    def _read(self) -> None:
        try:
            self._written += os.read(self._side, 65_536)
        except OSError:  # the program closed its side
            asyncio.get_running_loop().remove_reader(self._side)
        self._more.set()

    @property
    def shown(self) -> str:
        return ESCAPES.sub(b"", self._written).decode(errors="replace")

    def press(self, keys: bytes) -> None:
        self._written = b""
        os.write(self._side, keys)

    async def until(self, words: str) -> str:
        """Return what is shown once it has these words."""
        async with asyncio.timeout(WAIT_S):
            while words not in self.shown:
                self._more.clear()
                await self._more.wait()
        return self.shown

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")} | {"TERM": "xterm"}


@asynccontextmanager
async def top(*arguments: str) -> AsyncIterator[Terminal]:
    """Yield the terminal; at the end it must have the settings that it had before."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    command = (sys.executable, "-m", "router", "top", "--interval", "0.2", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=asyncio.subprocess.PIPE, env=variables()
    )
    terminal = Terminal(process, ours)
    try:
        yield terminal
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        os.close(theirs)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_and_a_decision_are_opened_by_keys(fleet: FleetProcesses, client: Client) -> None:
    answered = await client.complete([7] * 100, x_request_id="r-top")
    async with top("--router", fleet.control_url) as terminal:
        await terminal.until("q quit")
        shown = await terminal.until(answered.worker)
        assert "WORKER" in shown
        assert "EXACT" in shown
        terminal.press(b"\r")
        shown = await terminal.until("last decisions")
        assert "worker w0" in shown
        assert "takes new work" in shown
        terminal.press(b"\x1b")
        await terminal.until("enter open")
        terminal.press(b"d")
        await terminal.until("enter explain")
        terminal.press(b"\r")
        shown = await terminal.until("Outcome ok")
        assert "Request r-top: 100 tokens" in shown
        assert re.search(r"cost \d+\.\d = .*wait .*prefill", shown)
        terminal.press(b"q")
        assert await terminal.ended() == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_that_is_away_is_said_to_be_and_tried_again() -> None:
    (port,) = free_ports(1)
    async with top("--router", f"http://127.0.0.1:{port}") as terminal:
        await terminal.until("NOT REACHED (3 tries)")
        terminal.press(b"q")
        assert await terminal.ended() == 0


async def once(*arguments: str) -> tuple[int | None, str]:
    ended = await typed("-m", "router", "top", "--once", "--interval", "0.2", *arguments)
    return ended.code, ended.out + ended.err


@pytest.mark.asyncio(loop_scope="module")
async def test_once_prints_one_plain_screen(fleet: FleetProcesses) -> None:
    code, out = await once("--router", fleet.control_url)
    assert (code, "\x1b" in out) == (0, False)
    assert [line.split()[0] for line in out.splitlines() if line.startswith("w")] == ["w0", "w1"]
