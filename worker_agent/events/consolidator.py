"""Consolidates one worker's engine events into its ranks' mirrors, and puts the ranks' streams into the log.

    polled      an engine that this process polls (`Source`)
    published   a source that publishes itself (`PublisherAddress`): an engine in another process, or the owner of a
                host tier (a KV block manager). This process subscribes to it over ZeroMQ

A worker has at most one polled engine and any number of publishers; a block's copies are counted by source (ADR 1).
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import structlog
import zmq.asyncio

from kv_protocol import fleet, subjects
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import RESTARTS, Part, Restarts
from kv_runtime.tracing.service import EventTracing
from worker_agent.events.consolidation import SOLE, Consolidation, Origin
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.engine_events import EngineBatch
from worker_agent.events.mirror import ENGINE
from worker_agent.events.publishers import PublisherSection
from worker_agent.events.rank_answers import RankAnswers
from worker_agent.events.rank_stream import RankStreamSender
from worker_agent.events.source_cursor import Delivery
from worker_agent.events.source_poller import Source, SourcePoller
from worker_agent.port.types import POLL_S

_log = structlog.get_logger("consolidator")


class WorkerStreams(NamedTuple):
    """One worker whose streams are published. `publishers`: none if its engine is polled, or has no events."""

    id: str
    model: str
    instance: str
    block_size: int
    dp_ranks: tuple[int, ...]
    is_eagle: bool = False
    publishers: tuple[PublisherAddress, ...] = ()


class Consolidator:
    """Publishes one worker's ranks to the log.

    `source`: the engine that is polled, if any. `stale`: why the ranks' blocks are never known; empty: they are known.
    `tracing` None: no traces.
    """

    def __init__(
        self,
        core: Consolidation,
        readers: Sequence[EngineEventSubscriber],
        log: EventLog,
        clock: Clock,
        *,
        model: str,
        worker_id: str,
        source: Source | None = None,
        poll_s: float = POLL_S,
        restarts: Restarts = RESTARTS,
        stale: str = "",
        tracing: EventTracing | None = None,
    ) -> None:
        self.worker_id, self.core, self.readers = worker_id, core, tuple(readers)
        """The worker's id, the mirrors and outboxes, and the subscribers."""
        self._model, self._event_log, self._clock = model, log, clock
        self._always_stale = stale
        self.poller: SourcePoller | None = None
        """The poller of the engine, if that is polled."""
        if source is not None:
            self.poller = SourcePoller(source, self._on_batch, self._on_loss, clock, poll_s=poll_s, restarts=restarts)
        self._logged_stale: dict[int, str] = {}
        self._ranks = [WorkerRank(worker_id, dp_rank) for dp_rank in core.dp_ranks]
        self.streams = {
            rank.dp_rank: RankStreamSender(model, rank, core.outboxes[rank.dp_rank], log, clock, tracing=tracing)
            for rank in self._ranks
        }
        self.answers = {rank.dp_rank: RankAnswers(model, rank, core, log, clock) for rank in self._ranks}

    @property
    def is_log_away(self) -> bool:
        """Whether the log is known to be disconnected."""
        return not self._event_log.is_connected

    def stale(self, dp_rank: int) -> str:
        """Return why the rank's set may be wrong; empty if no reason is known."""
        return self.core.stale(dp_rank) or self._unread(dp_rank)

    def parts(self, first_stage: int) -> list[Part]:
        """Return the parts in three stages, which stop in this order.

        They are: sources; the ranks' streams; answers to readers, and heartbeats.
        """
        prefix, streams, answers = f"{self.worker_id}-", self.streams.items(), self.answers.items()
        return [
            *([] if self.poller is None else [self.poller.work.part(stage=first_stage)]),
            *(reader.part(self._fold, first_stage, prefix=prefix) for reader in self.readers),
            *(Part(f"{prefix}publish-{rank}", stream.run, first_stage + 1) for rank, stream in streams),
            *(Part(f"{prefix}answer-{rank}", answer.run, first_stage + 2) for rank, answer in answers),
            Part(f"{prefix}pulse", self._run_heartbeats, first_stage + 2),
        ]

    async def start(self) -> None:
        """Accept recovery requests, and announce the new epochs in a first heartbeat."""
        for answers in self.answers.values():
            await answers.listen()
        await self._publish_heartbeats()

    async def position(self) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq) after all that a polled engine had flushed before the call.

        For sources that publish themselves the position only covers the messages read so far.
        """
        if self.poller is not None:
            await self.poller.until_applied()
        return {rank: (outbox.epoch, outbox.last_seq) for rank, outbox in self.core.outboxes.items()}

    def status(self) -> list[dict[str, Any]]:
        """Return each source's status and its newest quarantined events, for operators."""
        polled = [
            {
                "source": ENGINE,
                "failure": poller.work.failure or poller.failure,
                "poll_failures": poller.poll_failures_total,
                "thread_failures": poller.work.failures_total,
                "quarantined": [each._asdict() for each in poller.source.rules.quarantine.kept],
            }
            for poller in filter(None, [self.poller])
        ]
        return polled + [
            {
                "source": str(reader.origin),
                "failure": reader.stale(),
                "lost": reader.cursor.lost_total,
                "refused": list(self.core.publishers[reader.origin].refused),
            }
            for reader in self.readers
        ]

    def _on_batch(self, batch: EngineBatch) -> None:
        self._wake(self.core.on_batch(batch))

    def _on_loss(self, origin: Origin = SOLE, *, began_anew: bool = False) -> None:
        self._wake(self.core.on_loss(origin, began_anew=began_anew))

    async def _fold(self, origin: Origin, delivery: Delivery) -> None:
        if delivery.lost:
            self._on_loss(origin, began_anew=delivery.began_anew)
        for at, (sequence, payload) in enumerate(delivery.payloads):
            if at:  # a replay may deliver thousands of payloads at once: heartbeats must go out between them
                await self._clock.sleep(0)
            self._wake(self.core.on_payload(sequence, payload, origin))

    def _wake(self, changed: Iterable[int]) -> None:
        for dp_rank in changed:
            self.streams[dp_rank].wake()

    async def _run_heartbeats(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._publish_heartbeats()
            await self._clock.wait(stop, HEARTBEAT_PERIOD_S)

    async def _publish_heartbeats(self) -> None:
        """Publish a heartbeat of each rank now."""
        for rank in self._ranks:
            heartbeat = self.core.heartbeat(rank.dp_rank, self._unread(rank.dp_rank))
            self._log_stale(rank, heartbeat.stale)
            payload = fleet.encode(heartbeat)
            try:
                await self._event_log.announce(subjects.heartbeat(self._model, rank), payload)
            except BrokerUnavailable as error:
                _log.debug("heartbeat_lost", reason=str(error))

    def _unread(self, dp_rank: int) -> str:
        """Return why events may not have reached the mirror; empty if no reason is known."""
        reasons = [reader.stale() for reader in self.readers if dp_rank in self.core.ranks_of(reader.origin)]
        reasons += [self._always_stale] if self._always_stale else self._unpolled(dp_rank)
        return "; ".join(filter(None, reasons))

    def _unpolled(self, dp_rank: int) -> list[str]:
        """Return why events of the polled engine may be missing or wrong."""
        if (poller := self.poller) is None:
            return []
        rules = poller.source.rules
        missing = rules.events_lost.get(dp_rank, 0) - poller.lost_before_read.get(dp_rank, 0)
        reasons = (
            f"polling failed: {poller.work.failure}" if poller.work.failure else "",
            f"{missing} events lost, relearning" if missing else "",
            rules.stale(dp_rank),
            poller.failure,
        )
        return [f"{ENGINE}: {reason}" for reason in reasons if reason]

    def _log_stale(self, rank: WorkerRank, reason: str) -> None:
        """Log when the rank becomes stale and when it is current again; reasons may change at every heartbeat."""
        logged = self._logged_stale.get(rank.dp_rank, "")
        self._logged_stale[rank.dp_rank] = reason
        if reason and not logged:
            _log.warning("rank_stale", rank=str(rank), reason=reason)
        elif logged and not reason:
            _log.info("rank_current", rank=str(rank))


def new_epoch() -> int:
    """Return a random epoch for a stream; never 0."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def event_path(
    worker: WorkerStreams,
    source: Source | None,
    configured: Iterable[PublisherSection],
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: Clock,
    *,
    ring_bytes_max: int,
    tracing: EventTracing | None = None,
    stale: str = "",
) -> Consolidator:
    """Return the consolidator of a worker, with a new epoch for each rank's stream.

    `source`: its engine, if that is polled; `configured` are further publishers.

    Raises:
        ConfigurationError: a publisher is of a rank that the worker lacks.
    """
    published = [*worker.publishers, *(each.at for each in configured)]
    strange = [each.origin for each in published if each.origin.dp_rank not in (None, *worker.dp_ranks)]
    if strange:
        found = ", ".join(f"dp_rank {each.dp_rank} of {each.source}" for each in strange)
        allowed = f"allowed the worker's ranks: {list(worker.dp_ranks)}"
        raise ConfigurationError([f"events.sources: found {found}, {allowed}"])
    core = Consolidation(
        worker.dp_ranks,
        worker.block_size,
        worker.instance,
        new_epoch,
        origins=[*([] if source is None else [SOLE]), *(each.origin for each in published)],
        is_eagle=worker.is_eagle,
        ring_bytes_max=ring_bytes_max,
    )
    return Consolidator(
        core,
        [EngineEventSubscriber(each, context, clock) for each in published],
        log,
        clock,
        model=worker.model,
        worker_id=worker.id,
        source=source,
        tracing=tracing,
        stale=stale,
    )
