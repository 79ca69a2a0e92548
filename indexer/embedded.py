"""The index inside another process: the only module that the router imports.

index = EmbeddedIndex(settings, log, clock);  await index.start();  parts = [..., *index.parts(stage)]
index.columns(chain, ranks)                   returns each rank's overlap, all of one moment, without an await
chat_pieces, hash_blocks                      return a prompt's tokens, and its sequence hashes
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter

import structlog
from aiohttp import web

from indexer.follow.fold import FoldStatistics, IndexFold, OverlapColumns, RankView
from indexer.follow.follower import FollowerLimits
from indexer.follow.status import is_blind
from indexer.index.prefix_index import OutlineNode, PassedRequest
from indexer.native.index import chat_pieces, hash_blocks, make_index
from indexer.service.feed import IndexFeed
from indexer.service.metrics import index_families, snapshot_families
from indexer.service.prefix_explorer import HeatSource, NodeUse, PrefixExplorer, UsesSource
from indexer.service.retention import KeepingLimits
from indexer.service.routes import BadParameter, index_routes
from indexer.service.snapshots import Snapshots
from kv_protocol import subjects
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import BrokerSilent, EventLog, StreamSpec, bucket_spec, log_families
from kv_runtime.supervise import Part
from kv_runtime.telemetry import Family
from kv_runtime.tracing.service import EventTracing

__all__ = [
    "BadParameter",
    "EmbeddedIndex",
    "FoldStatistics",
    "NodeUse",
    "OutlineNode",
    "OverlapColumns",
    "PassedRequest",
    "RankView",
    "chat_pieces",
    "ensure_streams",
    "hash_blocks",
    "is_blind",
]

STREAMS_S = 30.0
"""How long a process waits at its start for the server to answer."""
_ASK_AGAIN_S = 0.5
_FLEET_BYTES_MAX = 64 << 20
_SNAPSHOTS_IN_LOG = 4
"""How many snapshots the log's age limit spans, at least: the log must not drop messages that no snapshot covers."""
_DEFAULT_NATS, _FOLLOWER_LIMITS = NatsSection(), FollowerLimits()

_log = structlog.get_logger("indexer")


async def ensure_streams(log: EventLog, nats: NatsSection) -> None:
    """Create or update the streams that the index reads and the bucket of its snapshots, with the configured bounds.

    Raises:
        StreamUnfit: an existing stream or bucket cannot be ours.
        BrokerUnavailable: the server is away, refuses a stream (for lack of space, say), or has not answered for
            `STREAMS_S`. Silence for some seconds is normal: a cluster that is starting has no leaders.
    """
    events = StreamSpec(
        subjects.EVENTS_STREAM,
        (subjects.EVENTS_ALL,),
        nats.events_max_age_s,
        nats.events_max_bytes,
        replicas=nats.replicas,
    )
    fleet = StreamSpec(
        subjects.FLEET_STREAM, (subjects.FLEET_ALL,), 0, _FLEET_BYTES_MAX, per_subject=1, replicas=nats.replicas
    )
    snapshots = bucket_spec(subjects.SNAPSHOT_BUCKET, replicas=nats.replicas, max_bytes=nats.snapshots_bytes_max)
    deadline_s = asyncio.get_running_loop().time() + STREAMS_S
    while True:
        try:
            await log.ensure_stream(events)
            await log.ensure_stream(fleet)
            return await log.ensure_stream(snapshots)
        except BrokerSilent as error:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise
            _log.warning("streams_awaited", reason=str(error))
            await asyncio.sleep(_ASK_AGAIN_S)


class EmbeddedIndex:
    """A prefix index that follows the log. Its answers are those of an `IndexFold`, which documents them."""

    def __init__(
        self,
        settings: IndexSection,
        log: EventLog,
        clock: Clock,
        nats: NatsSection = _DEFAULT_NATS,
        *,
        limits: FollowerLimits = _FOLLOWER_LIMITS,
        logs_announced: bool = True,
        tracing: EventTracing | None = None,
    ) -> None:
        """Nothing is read yet. `nats` limits snapshots; `IndexFeed` documents `logs_announced` and `tracing`."""
        self._fold = fold = IndexFold(make_index(settings), limits)
        self.columns, self.overlap = fold.columns, fold.overlap
        """Each rank's overlap with a prefix and its stream's status: as columns, or rank by rank."""
        self.ranks, self.refused_ranks, self.state, self.held = fold.ranks, fold.refused_ranks, fold.state, fold.held
        self.statistics, self.block_counts, self.resyncs = fold.statistics, fold.block_counts, fold.resyncs
        self._event_log, self._clock = log, clock
        gate = FleetGate(nats.fleet_secrets)
        self._feed = IndexFeed(fold, log, clock, gate, logs_announced=logs_announced, tracing=tracing)
        self.catching_up, self.wait_for = self._feed.catching_up, self._feed.wait_for
        """As `IndexFeed` documents them."""
        keeping = KeepingLimits(
            period_s=min(nats.snapshot_period_s, nats.events_max_age_s / _SNAPSHOTS_IN_LOG),
            log_bytes_max=nats.events_max_bytes,
        )
        self._snapshots = Snapshots(fold, log, clock, keeping, nats.snapshots_bytes_max)
        self.log_statistics, self.snapshot_statistics = log.statistics, self._snapshots.statistics
        self.log_seq: Callable[[], int] = partial(attrgetter("log_position.stream_seq"), self._feed)
        """Returns the seq of the last applied message of `KV_EVENTS`; asked for with every decision."""

    async def start(self) -> None:
        """Restore the best snapshot, if there is one, and begin to read the log after it.

        Raises:
            BrokerUnavailable: no server, or no streams. Unreadable snapshots are skipped.
        """
        stream = await self._event_log.stream_state(subjects.EVENTS_STREAM)
        await self._feed.start(stream, await self._snapshots.restore(stream))

    def parts(self, stage: int) -> list[Part]:
        """Return the parts to run: the feed, the event log's client, and the snapshots."""
        return [
            Part("index", self._feed.run, stage),
            Part("event-log", self._event_log.run, stage),
            Part("snapshots", partial(self._snapshots.run, self._feed), stage),
        ]

    def routes(self, heat: HeatSource | None = None, uses: UsesSource | None = None) -> Sequence[web.RouteDef]:
        """Return the HTTP routes of ranks and prefix tree; `heat` and `uses` add how requests used the tree's nodes."""
        return index_routes(self._fold, PrefixExplorer(self._fold, self._clock, heat=heat, uses=uses))

    def event_lag_s(self) -> float | None:
        """Return the largest age that a rank's newest batch had when the fold took it; None: none came yet."""
        return max(self._feed.freshness_s.values(), default=None)

    def families(self) -> Iterator[Family]:
        """Yield the index's metrics."""
        yield from index_families(self._fold, self._feed)
        yield from snapshot_families(self.snapshot_statistics())
        yield from log_families(self.log_statistics())
