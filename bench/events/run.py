"""The processes of the event bench: a nats-server for each group, and the processes that run the roles.

async with Stage() as stage:  index = await stage.child("events.index");  await index.call("reach", ...)

Leaving the block leaves nothing behind.
"""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from bench.child import Child, Role
from bench.report import cpu_s
from indexer.embedded import ensure_streams
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog, StreamSpec
from kv_runtime.nats_server import EmbeddedNats

OURS = "events"
"""The subject of all rounds."""
BARE_STREAM, BARE_SUBJECT = "BARE", "bare.stored"
"""The stream and the subject of the bare client, beside our streams."""
_BARE_BYTES = 512 << 20


class LogRole(Role):
    """A role on the log at `url`; `begin` connects."""

    _log: EventLog

    def __init__(self, url: str) -> None:
        self._url = url
        self._clock = SystemClock()

    async def end(self) -> None:
        """Close the connection."""
        await self._log.close()


class Stage:
    """A nats-server with all streams and the bucket, and children, between entering and leaving the block."""

    def __init__(self) -> None:
        self._nats = EmbeddedNats(port=0)
        self._cleanup = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as cleanup:
            await cleanup.enter_async_context(self._nats)
            self.log = await EventLog.connect(self.url, name="bench")
            cleanup.push_async_callback(self.log.close)
            await ensure_streams(self.log, NatsSection())
            await self.log.ensure_stream(StreamSpec(BARE_STREAM, (BARE_SUBJECT,), 0, _BARE_BYTES))
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    @property
    def url(self) -> str:
        """The URL of its nats-server."""
        return self._nats.url

    async def child(self, role: str, **arguments: Any) -> Child:  # noqa: ANN401 - as the role takes it
        """Return a process that runs a role on this log until the block is left."""
        child = await Child.start(role, {"url": self.url} | arguments)
        self._cleanup.push_async_callback(child.close)
        return child

    def nats_cpu_s(self) -> float:
        """Return the CPU time of the server so far."""
        return cpu_s(self._nats.pid)
