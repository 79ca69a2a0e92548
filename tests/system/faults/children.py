"""Child processes of one test: killed, frozen and started again as the test says; none may end or complain by itself.

async with Children() as children:  child = await children.start("router", command, ready="router on")
"""

import asyncio
import os
import signal
import sys
from types import TracebackType
from typing import Self

from bench.processes import ChildProcess

_SHOWN_LINES = 30
_CHATTER = ("[INF]", "connect to route")
_COMPLAINTS = ("Traceback (most recent call last)", "panic:")


class Child(ChildProcess):
    """One process, and what was done to it."""

    def __init__(self, name: str, command: list[str]) -> None:
        super().__init__(name, command)
        self.was_ended = False

    @property
    def tail(self) -> str:
        """The last lines it printed, but for those with which nats-server fills pages."""
        lines = [line for line in self.output.splitlines() if not any(words in line for words in _CHATTER)]
        return "\n".join(lines[-_SHOWN_LINES:])

    async def kill(self) -> None:
        """It is gone without a word."""
        await self.end(signal.SIGKILL)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.was_ended = True
        if self.is_running:
            self.thaw()
        await super().end(number)

    async def until_ended(self) -> int:
        """Return its exit code once it has ended, which it was asked to."""
        self.was_ended = True
        return await super().until_ended()

    def freeze(self) -> None:
        """It stands still: its sockets stay open, and nothing is read or said."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Children:
    """All processes of a test. Leaving the block kills them, and fails for one that ended uninvited or complained."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._all: list[Child] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        complaints = self._complaints()
        said = "\n".join(f"---- {child.name}\n{child.tail}" for child in self._all)
        await asyncio.gather(*(child.kill() for child in self._all))
        await self._group.__aexit__(None, None, None)
        if error is not None:
            error.add_note(said)
        else:
            assert complaints == [], said

    async def start(self, name: str, command: list[str], *, ready: str) -> Child:
        """Return the process once it has printed `ready`."""
        child = Child(name, command)
        self._all.append(child)
        await child.start(self._group)
        await child.line_with(ready)
        return child

    async def start_ours(self, name: str, *arguments: str, ready: str, settings: tuple[str, ...] = ()) -> Child:
        """Return one of our own processes: `arguments` begin with the package; `settings` are assignments."""
        assigned = [part for setting in settings for part in ("--set", setting)]
        return await self.start(name, [sys.executable, "-m", *arguments, *assigned], ready=ready)

    def _complaints(self) -> list[str]:
        ended = [f"{child.name} ended" for child in self._all if not child.is_running and not child.was_ended]
        said = [f"{child.name}: {words}" for child in self._all for words in _COMPLAINTS if words in child.output]
        return ended + said
