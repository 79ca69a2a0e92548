"""The processes of the event bench (a nats-server for each group, a process for each role), and their load.

async with Stage() as stage:  index = await stage.child(IndexRole);  await index.call("reach", ...)

Leaving the block leaves nothing behind.

The load is blocks of sequences that grow side by side, as an engine reports them. A seed decides all of it.

    sequence   a chain of 512 blocks of tokens that no other sequence has
    event      some blocks of one sequence, stored; the next event is of the next sequence, `SIDE_BY_SIDE` in turn
    payload    several events in one engine-event message
    schedule   flushes, evenly in time, each with the events that an engine would report at that moment

Tokens are u16s. Engine hashes count up from a start that differs by 2^40 from seed to seed.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from hashlib import shake_128
from math import ceil
from types import TracebackType
from typing import Any, NamedTuple, Self

from bench.child import Answer, Child, Role
from bench.report import cpu_s
from indexer.embedded import ensure_streams
from kv_runtime.clock import Clock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog, StreamSpec
from kv_runtime.nats_server import EmbeddedNats
from kv_runtime.supervise import Part
from worker_agent.events.engine_events import EngineStored

SEQUENCE_BLOCKS = 512
SIDE_BY_SIDE = 16
FLUSH_S = 0.02
"""The duration of an engine's iteration, at whose end the engine reports what it computed."""
_KEY = struct.Struct("<QQ")
_HASHES_OF_A_SEED = 1 << 40


class EventLoad(NamedTuple):
    """Blocks of `block_size` tokens, in events of `event_blocks`; another seed gives other blocks."""

    seed: int
    blocks: int
    event_blocks: int
    block_size: int


def engine_events(load: EventLoad) -> Iterator[EngineStored]:
    """Yield the events, each of `event_blocks` blocks; fewer at the end of a sequence or of the load."""
    sequences = ceil(load.blocks / SEQUENCE_BLOCKS)
    for first in range(0, sequences, SIDE_BY_SIDE):
        group = range(first, min(first + SIDE_BY_SIDE, sequences))
        tokens = {number: _tokens(load, number) for number in group}
        for start in range(0, SEQUENCE_BLOCKS, load.event_blocks):
            for number in group:
                end = min(start + load.event_blocks, SEQUENCE_BLOCKS, load.blocks - number * SEQUENCE_BLOCKS)
                if start < end:
                    yield _stored(load, number, tokens[number], range(start, end))


def _tokens(load: EventLoad, number: int) -> "array[int]":
    tokens = array("H")
    tokens.frombytes(shake_128(_KEY.pack(load.seed, number)).digest(2 * load.block_size * SEQUENCE_BLOCKS))
    return tokens


def _stored(load: EventLoad, number: int, tokens: "array[int]", blocks: range) -> EngineStored:
    before = load.seed * _HASHES_OF_A_SEED + number * SEQUENCE_BLOCKS
    return EngineStored(
        block_hashes=tuple(range(before + blocks.start + 1, before + blocks.stop + 1)),
        parent_block_hash=before + blocks.start if blocks.start else None,
        token_ids=tuple(tokens[load.block_size * blocks.start : load.block_size * blocks.stop]),
        block_size=load.block_size,
    )


class Flush(NamedTuple):
    """Events that an engine reports `after_s` seconds after the start."""

    after_s: float
    events: Sequence[EngineStored]


def schedule(load: EventLoad, blocks_s: float) -> list[Flush]:
    """Return an engine's flushes at `blocks_s` blocks a second: `FLUSH_S` apart, or more if one event takes more."""
    period_s = max(FLUSH_S, load.event_blocks / blocks_s)
    flushed_blocks, flushes = 0, dict[int, list[EngineStored]]()
    for event in engine_events(load):
        flushed_blocks += len(event.block_hashes)
        flushes.setdefault(ceil(flushed_blocks / (period_s * blocks_s)), []).append(event)
    return [Flush(number * period_s, events) for number, events in flushes.items()]


MODEL = "bench"
OURS = "events"
"""The measured subject of all rounds (`Rounds`)."""
BARE_STREAM, BARE_SUBJECT = "BARE", "bare.stored"
"""The stream and the subject of the bare client, beside our streams."""
_BARE_BYTES = 512 << 20
_LAST_STAGE = 6
"""The connection ends after what uses it."""


class LogRole(Role):
    """A role on the log at `url`; `begin` connects as `LogType`."""

    LogType: type[EventLog] = EventLog

    def __init__(self, url: str) -> None:
        self._url = url
        self._clock = Clock()

    async def begin(self) -> Answer:
        """Connect; the streams exist already."""
        self._log = await self.LogType.connect(self._url, name=type(self).__name__)
        return {}

    def parts(self) -> list[Part]:
        """Return the part of the connection."""
        return [Part("log", self._log.run, _LAST_STAGE)]

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
            self.url = self._nats.url
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

    async def child(self, role: type[Role], **arguments: Any) -> Child:  # noqa: ANN401 - as the role takes it
        """Return a process that runs a role on this log until the block is left."""
        child = await Child.start(role, {"url": self.url} | arguments)
        self._cleanup.push_async_callback(child.close)
        return child

    def nats_cpu_s(self) -> float:
        """Return the CPU time of the server so far."""
        return cpu_s(self._nats.pid)


class EventsPlan(NamedTuple):
    """Sizes in blocks, times in seconds. The targets are set for the defaults."""

    rounds: int = 3
    """Rounds of each cell except freshness, which measures many events; medians are shown."""

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
    """The bare client repeats a round's messages until it has published this many: a round has few."""

    # cold start
    ranks: int = 8
    rank_blocks: int = 125_000
    tail_blocks: int = 1_250
    """Each rank's blocks that the log has after the snapshot."""


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
