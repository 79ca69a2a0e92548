"""A real nats-server that a test kills, freezes and starts again on the same port, with its store or without."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kv_runtime.clock import SystemClock
from kv_runtime.nats_server import EmbeddedNats

WAIT_S = 20.0
_LOOK_S = 0.005


class Broker:
    """The server of one test. Its address never changes."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._server = EmbeddedNats(port=0, store_dir=store)
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = EmbeddedNats(port=self.port, store_dir=self._store)
        await self._server.start()
        self.port = int(self._server.url.rsplit(":", 1)[1])

    async def kill(self) -> None:
        """It is gone without a word."""
        os.kill(self._server.pid, signal.SIGKILL)
        await self._server.stop()

    def freeze(self) -> None:
        """Connections stay up, nothing is answered: the server, which may be at work elsewhere, has stopped."""
        os.kill(self._server.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._server.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def lose_store(self) -> None:
        """What was kept is gone; between `kill` and `start`."""
        shutil.rmtree(self._store)

    async def stop(self) -> None:
        await self._server.stop()


@asynccontextmanager
async def running_broker(store: Path) -> AsyncIterator[Broker]:
    broker = Broker(store)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


async def eventually(holds: Callable[[], object], what: str = "", timeout_s: float = WAIT_S) -> None:
    """Return once `holds()` is true: for state of other threads and processes, where there is nothing to wait on."""
    try:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await SystemClock().sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what or holds}") from None
