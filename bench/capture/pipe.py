"""The real path of events, in one process: recorded frames -> ZeroMQ -> consolidator -> JetStream -> index.

Every part is the production one, composed here as `__main__` modules do; only the publisher is played.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import zmq
import zmq.asyncio

from bench.capture.capture import Capture, CapturedFrame
from bench.capture.publisher import CapturePublisher, Chaos
from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.nats_server import EmbeddedNats
from kv_runtime.supervise import Part, run_parts, until
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.mirror import MirrorCounts

T = TypeVar("T")

MODEL, WORKER_ID = "capture", "engine"
BARRIER_S = 120.0
"""How long one step of the way may take; a capture's round takes some ten milliseconds."""
AGREE_S = 10.0
"""How long the index may hold something else than it should: several heartbeats and dumps."""
_DRAIN_S = 10.0
_IDLE_S = 0.05
_POLL_S = 0.02
_FRAMES_AT_ONCE = 1000
_EVENTS_BYTES_MAX = 256 << 20


class CheckFailed(Exception):
    """A check that did not finish."""


class PipeStuck(CheckFailed):
    """The pipe did not deliver in time; the message names what was expected."""


class PipeDiffers(CheckFailed):
    """The index does not hold what the frames imply: a bug of ours."""


class Pipe:
    """The way from a capture's frames to the index, while it runs."""

    def __init__(
        self,
        hops: Sequence[tuple[CapturePublisher, EngineEventSubscriber]],
        core: Consolidation,
        index: EmbeddedIndex,
        clock: Clock,
    ) -> None:
        self._hops = {reader.origin.dp_rank: (publisher, reader) for publisher, reader in hops}
        self._core, self._index, self._clock = core, index, clock
        self._ranks = [WorkerRank(WORKER_ID, dp_rank) for dp_rank in core.dp_ranks]

    async def connected(self) -> None:
        """Wait until the consolidator listens: from now on only chaos loses frames."""
        for publisher, reader in self._hops.values():
            async with _waiting(f"the consolidator to subscribe to publisher {reader.origin}"):
                await publisher.subscribed()

    async def deliver(self, frames: Sequence[CapturedFrame]) -> None:
        """The index has applied all frames so far, `frames` the last of them."""
        for start in range(0, len(frames), _FRAMES_AT_ONCE):
            await self._read(frames[start : start + _FRAMES_AT_ONCE])
            for rank in self._ranks:
                outbox = self._core.outbox(rank.dp_rank)
                async with _waiting(f"the index to apply seq {outbox.last_seq} of epoch {outbox.epoch} of {rank}"):
                    await self._index.wait_for(rank, outbox.epoch, outbox.last_seq)

    async def _read(self, frames: Sequence[CapturedFrame]) -> None:
        newest = {frame.publisher: frame.sequence for frame in frames}
        for own, (publisher, _) in self._hops.items():
            await publisher.publish([frame for frame in frames if frame.publisher == own])
        for own, sequence in newest.items():
            _, reader = self._hops[own]
            async with _waiting(f"frame {sequence} of publisher {reader.origin} to be read by the consolidator"):
                await reader.until_read(sequence + 1)

    async def agree(self, dp_rank: int, held: dict[int, int]) -> None:
        """The index holds exactly `held` (sequence hash -> tier bits), at once or after a resync.

        Blocks that the index cannot place come by a dump, which it requests after the next heartbeat (every second).

        Raises:
            PipeDiffers: it holds something else for good.
        """
        rank = WorkerRank(WORKER_ID, dp_rank)
        end_s = self._clock.now() + AGREE_S
        while (found := {block.sequence_hash: block.tier_bits for block in self._index.held(rank)}) != held:
            if self._clock.now() > end_s:
                lacking, foreign = len(held.items() - found.items()), len(found.items() - held.items())
                raise PipeDiffers(f"rank {rank}: the index lacks {lacking} blocks and has {foreign} that it should not")
            await self._clock.sleep(_POLL_S)

    def overlap(self, sequence_hashes: Sequence[int]) -> int:
        """Return the longest prefix that some rank holds, in blocks, on any tiers."""
        return max(view.overlap_blocks[-1] for view in self._index.overlap(sequence_hashes, self._ranks))

    def mirror_counts(self) -> list[MirrorCounts]:
        """Return what the consolidator made of the events so far, by rank and source."""
        sources = dict.fromkeys(origin.source for origin in self._core.publishers)
        return [self._core.mirror(rank).counts[source] for rank in self._core.dp_ranks for source in sources]

    @property
    def refused_events(self) -> int:
        """How many events could not be read."""
        return sum(each.decoder.counts.refused for each in self._core.publishers.values())


async def through_pipe(
    work: Callable[[Pipe], Awaitable[T]],
    stop: asyncio.Event,
    capture: Capture,
    dp_ranks: tuple[int, ...],
    chaos: Chaos | None = None,
) -> tuple[T, list[CapturePublisher]] | None:
    """Return what `work` returned with a new pipe, and the publishers for their counts; None when stopped.

    Sets `stop` when it is done.

    Raises:
        PipeStuck: something did not come in time.
        PipeDiffers: the index holds what it should not; raised by `work`.
        NatsServerError, BrokerUnavailable: the event log.
    """
    clock, outcome = SystemClock(), None
    async with AsyncExitStack() as cleanup:
        nats = await cleanup.enter_async_context(EmbeddedNats(port=0))
        log = await EventLog.connect(nats.url, name="check-capture")
        cleanup.push_async_callback(log.close)
        await ensure_streams(log, NatsSection(events_max_bytes=_EVENTS_BYTES_MAX))
        context = zmq.asyncio.Context()
        cleanup.callback(context.destroy, linger=0)
        index = EmbeddedIndex(IndexSection(), log, clock)
        hops = [_hop(context, clock, publisher, chaos) for publisher in capture.publishers]
        origins = [reader.origin for _, reader in hops]
        core = Consolidation(dp_ranks, capture.block_size, "capture", lambda: secrets.randbits(64), origins=origins)
        readers = [reader for _, reader in hops]
        consolidator = Consolidator(core, readers, log, clock, model=MODEL, worker_id=WORKER_ID)

        async def check(part_stop: asyncio.Event) -> None:
            nonlocal outcome
            outcome = await until(part_stop, work(Pipe(hops, core, index, clock)))
            stop.set()

        await index.start()
        await consolidator.start()
        await run_parts(
            [
                Part("check", check, 0),
                *consolidator.parts(1),
                *(Part(f"replay-{reader.origin}", publisher.run, 5) for publisher, reader in hops),
                *index.parts(6),
                Part("nats-server", nats.run, 7),
            ],
            stop=stop,
            drain_s=_DRAIN_S,
        )
    return None if outcome is None else (outcome, [publisher for publisher, _ in hops])


def _hop(
    context: zmq.asyncio.Context, clock: Clock, dp_rank: int | None, chaos: Chaos | None
) -> tuple[CapturePublisher, EngineEventSubscriber]:
    """Return a publisher and its reader as it attaches to any; impatient, so that a lost last frame costs little."""
    publisher = CapturePublisher(context, chaos=chaos)
    at = PublisherAddress(Origin(dp_rank=dp_rank), publisher.endpoint, publisher.replay_endpoint)
    return publisher, EngineEventSubscriber(at, context, clock, idle_s=_IDLE_S)


@asynccontextmanager
async def _waiting(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BARRIER_S):
            yield
    except TimeoutError:
        raise PipeStuck(f"waited {BARRIER_S:.0f} s for {what}") from None
