"""A real nats-server that a test kills, freezes and starts again on the same port, with its store or without."""

import asyncio
import inspect
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import nats

from kv_runtime.clock import Clock
from kv_runtime.nats_server import EmbeddedNats

WAIT_S = 20.0
_KEPT = ".kept"
_LOOK_S = 0.005


class Broker:
    """A server. Its address never changes; its part in an event loop is in `loop`, or in that of who calls."""

    def __init__(self, store: Path, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._store = store
        self._loop = loop
        self._server: EmbeddedNats | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        server = EmbeddedNats(port=self.port, store_dir=self._store)
        await self._there(server.start())
        self._server = server
        self.port = int(server.url.rsplit(":", 1)[1])

    async def kill(self) -> None:
        """It is gone without a word."""
        self._signal(signal.SIGKILL)
        await self.stop()

    def freeze(self) -> None:
        """Connections stay up, nothing is answered: the server, which may be at work elsewhere, has stopped."""
        os.waitid(os.P_PID, self._signal(signal.SIGSTOP), os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def lose_store(self) -> None:
        """What was kept is gone; between `kill` and `start`."""
        shutil.rmtree(self._store)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await self._there(server.stop())

    async def renew(self) -> None:
        """It runs and keeps nothing, whatever was done to it: as one that was started for the first time."""
        if self._server is None:
            shutil.rmtree(self._store, ignore_errors=True)
            await self.start()
            return
        self.thaw()
        streams = self._store / "jetstream" / "$G" / "streams"
        # An empty directory the server removes, now and then while it makes a stream there, which fails.
        (streams / _KEPT).mkdir(parents=True, exist_ok=True)
        client = await nats.connect(self.url)
        log = client.jetstream()
        for stream in await log.streams_info():
            await log.delete_stream(stream.config.name or "")
        await client.close()
        # The server removes files later; a stream of the same name that is made meanwhile may find the old messages.
        await eventually(lambda: not _entries(streams) - {_KEPT})

    def _signal(self, number: signal.Signals) -> int:
        assert self._server is not None
        os.kill(self._server.pid, number)
        return self._server.pid

    async def _there(self, call: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            await call
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


def _entries(directory: Path) -> set[str]:
    with suppress(FileNotFoundError):
        return {each.name for each in directory.iterdir()}
    return set()


@contextmanager
def lasting_broker(store: Path) -> Iterator[Broker]:
    """A broker that tests with event loops of their own have in turn, each after `renew`."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    broker = Broker(store, loop)
    try:
        yield broker
    finally:
        asyncio.run_coroutine_threadsafe(broker.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def running_broker(store: Path) -> AsyncIterator[Broker]:
    broker = Broker(store)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


async def eventually(holds: Callable[[], object], what: str = "", timeout_s: float = WAIT_S) -> None:
    """Return once `holds()`, or what it awaits, is true: for state of others, where there is nothing to wait on."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (await found if inspect.isawaitable(found := holds()) else found):
                await Clock().sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what or holds}") from None
