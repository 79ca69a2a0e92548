"""A simulated engine's KV transfers in wall time, both ends.

    fetch   the receiver: reserves space in its buffer, then requests the KV from the sender, which answers when all is
            sent
    send    the sender: reserves space in its buffer, then the transfer's time passes; then the context is released

No KV is moved. The receiver gives up after the transfers' timeout, the sender when the receiver disconnects; the space
is freed in both cases. A context whose sending was interrupted stays held, until it is fetched or expires.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import Fetch, TransferBuffer
from worker_agent.port.types import EngineError

Send = Callable[[int, bytes, int], Awaitable[int]]
"""Send so many tokens of the context of a name and a state, and return the bytes; raise `FetchRefused`."""


class TransferFailed(EngineError):
    """A prompt's KV did not come to the decode engine, before any output."""


class FetchRefused(Exception):
    """The fetch failed: the sender does not hold the context (gone), or does not answer (lost)."""

    def __init__(self, outcome: Literal["gone", "lost"], why: str) -> None:
        super().__init__(why)
        self.outcome: Literal["gone", "lost"] = outcome


class Carrier(Protocol):
    """Carries the messages of simulated transfers between engines."""

    async def start(self) -> None:
        """Return when `endpoint` is known; fetches are served while `run` runs."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve fetches until `stop` is set, then free all resources; it may be called repeatedly."""

    @property
    def endpoint(self) -> str:
        """The address for other engines to fetch this engine's contexts from; after `start`."""

    def serve(self, send: Send) -> None:
        """Serve fetches at `endpoint` with `send`."""

    def check(self, endpoint: str) -> None:
        """Raise `RequestRefused` unless KV may be fetched from `endpoint`."""

    async def fetch(self, fetch: Fetch) -> None:
        """Return once all KV has come; raise `FetchRefused`."""


class Clock(Protocol):
    """Monotonic wall time in seconds."""

    def now(self) -> float:
        """Return the time."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; if 0, after other tasks have run."""


class Transfers:
    """One engine's transfers; `changed` is called whenever the simulator may have work again."""

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
        """The engine's buffer, for tests."""
        return self._buffer.buffer

    async def fetch(self, fetch: Fetch) -> None:
        """Fetch a request's KV and report the outcome to the simulator."""
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
        """Return the bytes sent; raise `FetchRefused` if the context is not held, or being sent to another engine."""
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
    """A buffer that tasks can wait for."""

    def __init__(self, buffer: TransferBuffer) -> None:
        self.buffer = buffer
        self._granted: dict[Hashable, asyncio.Event] = {}

    @asynccontextmanager
    async def reserved(self, tokens: int) -> AsyncIterator[None]:
        """Reserve space for so many tokens in the block."""
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
