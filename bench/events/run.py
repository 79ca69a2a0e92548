"""The processes of the event bench: a nats-server for each group, and the processes that run the roles.

async with Stage() as stage:  index = await stage.child(IndexRole);  await index.call("reach", ...)

Leaving the block leaves nothing behind.
"""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

from bench.child import Child, Role
from bench.report import cpu_s
from indexer.embedded import ensure_streams
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog, StreamSpec
from kv_runtime.nats_server import EmbeddedNats

MODEL = "bench"
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

    async def child(self, role: type[Role], **arguments: Any) -> Child:  # noqa: ANN401 - as the role takes it
        """Return a process that runs a role on this log until the block is left."""
        child = await Child.start(role, {"url": self.url} | arguments)
        self._cleanup.push_async_callback(child.close)
        return child

    def nats_cpu_s(self) -> float:
        """Return the CPU time of the server so far."""
        return cpu_s(self._nats.pid)


class EventsPlan(NamedTuple):
    """Sizes in blocks, times in seconds. The defaults are what the targets are for."""

    rounds: int = 3
    """Of all but freshness, which measures many events; medians are shown."""

    # freshness
    rates_blocks_s: tuple[int, ...] = (1_000, 10_000, 50_000)
    agents: int = 4
    flowing_s: float = 6.0
    warming_s: float = 1.0
    has_fleet: bool = True

    # throughput
    throughput: tuple[tuple[int, int], ...] = ((1, 30_000), (8, 120_000), (64, 200_000), (512, 200_000))
    """Blocks of an event, and of a round."""
    bare_messages_min: int = 512
    """Published repeatedly until there are so many: a round has few messages."""

    # cold start
    ranks: int = 8
    rank_blocks: int = 125_000
    tail_blocks: int = 1_250
    """Of each rank: what the log has after the snapshot."""


QUICK = EventsPlan(
    rounds=1,
    rates_blocks_s=(2_000,),
    agents=2,
    flowing_s=1.0,
    warming_s=0.2,
    has_fleet=False,
    throughput=((8, 4_000), (64, 16_000)),
    bare_messages_min=16,
    ranks=2,
    rank_blocks=4_000,
    tail_blocks=64,
)
"""A check that everything runs; the figures mean nothing."""
