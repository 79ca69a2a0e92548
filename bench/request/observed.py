"""The other side of `observed_router.py`: starts and stops what a router observes of itself."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from kv_runtime.clock import SystemClock

_POLL_S = 0.05


class Observed:
    """A router that observes itself; its files are in `directory`."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._pid, self._directory = pid, directory
        self._clock = SystemClock()

    async def start(self, kind: str) -> None:
        """Start a kind of observation."""
        command = self._directory / "command"
        command.write_text(kind)
        os.kill(self._pid, signal.SIGUSR1)
        while command.exists():
            await self._clock.sleep(_POLL_S)

    async def stop(self, found: type[list[Any]]) -> list[Any]:
        """Stop it, and return what was found."""
        result = self._directory / "result.json"
        os.kill(self._pid, signal.SIGUSR2)
        while not result.exists():
            await self._clock.sleep(_POLL_S)
        decoded: list[Any] = msgspec.json.decode(result.read_bytes(), type=found)
        result.unlink()
        return decoded
