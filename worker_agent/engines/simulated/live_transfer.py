"""A simulated engine's KV transfers in wall time, both ends.

    fetch   the receiver: places in the own buffer, then the other engine is asked, which answers when all is sent
    send    the sender: places in the own buffer, then the transfer's time passes; then the context is held no more

No KV is moved. Who fetches gives up after the transfers' timeout, who sends when nobody listens any more; places are
given back either way. A context of which sending was broken off stays held, until it is fetched or its time is up.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import Fetch, TransferBuffer
from worker_agent.engines.types import EngineError

Send = Callable[[int, bytes, int], Awaitable[int]]
"""Send so many tokens of the context of a name and a state, and return the bytes; raise `FetchRefused`."""


class TransferFailed(EngineError):
    """A prompt's KV did not come to the decode engine; nothing of the answer was said."""


class FetchRefused(Exception):
    """Nothing comes: the sender does not hold the context (gone), or does not answer (lost)."""

    def __init__(self, outcome: Literal["gone", "lost"], why: str) -> None:
        super().__init__(why)
        self.outcome: Literal["gone", "lost"] = outcome


class Carrier(Protocol):
    """What carries the words of transfers between engines; the KV is imagined."""

    async def start(self) -> None:
        """Return when others can ask at `endpoint`; they are answered while it runs."""

    async def run(self, stop: asyncio.Event) -> None:
        """Answer those who ask until `stop` is set; afterwards nothing is left of it, however often it is called."""

    @property
    def endpoint(self) -> str:
        """Where other engines ask for what this one holds; after `start`."""

    def serve(self, send: Send) -> None:
        """Let those who ask at `endpoint` be answered by `send`."""

    def check(self, endpoint: str) -> None:
        """Return where KV may be fetched from `endpoint`; raise `RequestRefused`."""

    async def fetch(self, fetch: Fetch) -> None:
        """Return when all has come; raise `FetchRefused`."""


class Clock(Protocol):
    """Wall time, in seconds from anywhere, never backwards."""

    def now(self) -> float:
        """Return the time."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; where that is 0, after other tasks had their turn."""


class Transfers:
    """One engine's; `changed` is called whenever the simulator may have work again."""

    def __init__(
        self, simulator: Simulator, carrier: Carrier, clock: Clock, speed: float, changed: Callable[[], None]
    ) -> None:
        self._simulator, self._carrier, self._clock, self._speed = simulator, carrier, clock, speed
        self._changed = changed
        self._rules = simulator.transfers
        self._buffer = _AwaitableBuffer(TransferBuffer(self._rules.buffer_tokens))
        self._sending: set[int] = set()

    @property
    def buffer(self) -> TransferBuffer:
        """The engine's buffer, to be looked at."""
        return self._buffer.buffer

    async def fetch(self, fetch: Fetch) -> None:
        """Fetch what a request waits for and tell the simulator how that went."""
        began_s = self._clock.now()
        try:
            async with asyncio.timeout(self._rules.timeout_s / self._speed), self._buffer.reserved(fetch.tokens):
                await self._carrier.fetch(fetch)
        except TimeoutError:
            self._simulator.fetch_failed(fetch, self._rules.too_late(fetch.tokens))
        except FetchRefused as refused:
            self._simulator.fetch_failed(fetch, refused.outcome)
        else:
            self._simulator.fetched(fetch, (self._clock.now() - began_s) * self._speed)
        self._changed()

    async def send(self, name: int, state: bytes, tokens: int) -> int:
        """Return how many bytes went; raise `FetchRefused` where there is nothing to send, or somebody else gets it."""
        if name in self._sending or not self._simulator.holds(name, state, tokens):
            raise FetchRefused("gone", f"transfer {name}: not held here, or being sent")
        self._sending.add(name)
        try:
            async with self._buffer.reserved(tokens):
                await self._clock.sleep(self._rules.duration_s(tokens) / self._speed)
        finally:
            self._sending.remove(name)
        if not self._simulator.hand_over(name):
            raise FetchRefused("gone", f"transfer {name}: given up meanwhile")
        self._changed()
        return tokens * self._rules.token_bytes


class _AwaitableBuffer:
    """A buffer whose places can be waited for."""

    def __init__(self, buffer: TransferBuffer) -> None:
        self.buffer = buffer
        self._granted: dict[Hashable, asyncio.Event] = {}

    @asynccontextmanager
    async def reserved(self, tokens: int) -> AsyncIterator[None]:
        """Be where so many places are had; they are given back at the end."""
        granted = asyncio.Event()
        self._granted[granted] = granted
        try:
            self._wake(self.buffer.request(granted, tokens))
            await granted.wait()
            yield
        finally:
            del self._granted[granted]
            self._wake(self.buffer.release(granted))

    def _wake(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._granted[key].set()
