"""Consolidates one worker's engine events into its ranks' mirrors, and puts the ranks' streams into the log.

Parts of a process (see `kv_runtime.supervise`): a subscriber for each publisher; each rank's stream; each rank's
answers to readers that lack batches; and the heartbeats, which carry digests of each rank's blocks every second.
The pollers of this process's sources (`source_poller.py`) call `on_batch` and `on_loss`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from kv_protocol import fleet, subjects
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import Part
from kv_runtime.tracing.service import EventTracing
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber
from worker_agent.events.engine_events import EngineBatch
from worker_agent.events.rank_answers import RankAnswers
from worker_agent.events.rank_stream import RankStreamSender
from worker_agent.events.source_cursor import Delivery

_log = structlog.get_logger("consolidator")


class Consolidator:
    """Publishes one worker's ranks to the log.

    `source_stale` returns why a rank's events from a polled source may be wrong. `tracing` None: no traces.
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
        source_stale: Callable[[int], str] | None = None,
        tracing: EventTracing | None = None,
    ) -> None:
        self.worker_id, self.core, self.readers = worker_id, core, tuple(readers)
        """The worker's id, the mirrors and outboxes, and the subscribers."""
        self._model, self._event_log, self._clock = model, log, clock
        self._source_stale = source_stale
        self._logged_stale: dict[int, str] = {}
        self._ranks = [WorkerRank(worker_id, dp_rank) for dp_rank in core.dp_ranks]
        self.streams = {
            rank.dp_rank: RankStreamSender(model, rank, core.outbox(rank.dp_rank), log, clock, tracing=tracing)
            for rank in self._ranks
        }
        self.answers = {rank.dp_rank: RankAnswers(model, rank, core, log, clock) for rank in self._ranks}

    @property
    def is_log_away(self) -> bool:
        """Whether the log is disconnected, as far as is known."""
        return not self._event_log.is_connected

    def stale(self, dp_rank: int) -> str:
        """Return why the rank's set may be wrong; empty if no reason is known."""
        return self.core.stale(dp_rank) or self._unread(dp_rank)

    def parts(self, first_stage: int) -> list[Part]:
        """Return the parts in four stages, which stop in this order.

        Live messages; the replays that they request; the ranks' streams; answers to readers, and heartbeats.
        """
        prefix, streams, answers = f"{self.worker_id}-", self.streams.items(), self.answers.items()
        return [
            *(part for reader in self.readers for part in reader.parts(self._fold, first_stage, prefix=prefix)),
            *(Part(f"{prefix}publish-{rank}", stream.run, first_stage + 2) for rank, stream in streams),
            *(Part(f"{prefix}answer-{rank}", answer.run, first_stage + 3) for rank, answer in answers),
            Part(f"{prefix}pulse", self._run_heartbeats, first_stage + 3),
        ]

    async def start(self) -> None:
        """Accept recovery requests, and announce the new epochs in a first heartbeat."""
        for answers in self.answers.values():
            await answers.listen()
        await self._publish_heartbeats()

    def positions(self) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq) now."""
        return {rank: (self.core.outbox(rank).epoch, self.core.outbox(rank).last_seq) for rank in self.core.dp_ranks}

    def on_batch(self, batch: EngineBatch, origin: Origin) -> None:
        """Apply a batch of a source that this process polls."""
        self._wake(self.core.on_batch(batch, origin))

    def on_loss(self, origin: Origin) -> None:
        """Remove the blocks of a source whose events are lost for good."""
        self._wake(self.core.on_loss(origin))

    async def _fold(self, origin: Origin, delivery: Delivery) -> None:
        if delivery.lost:
            self._wake(self.core.on_loss(origin, began_anew=delivery.began_anew))
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
        if self._source_stale is not None:
            reasons.append(self._source_stale(dp_rank))
        return "; ".join(filter(None, reasons))

    def _log_stale(self, rank: WorkerRank, reason: str) -> None:
        """Log when the rank becomes stale and when it is current again; reasons may change at every heartbeat."""
        logged = self._logged_stale.get(rank.dp_rank, "")
        self._logged_stale[rank.dp_rank] = reason
        if reason and not logged:
            _log.warning("rank_stale", rank=str(rank), reason=reason)
        elif logged and not reason:
            _log.info("rank_current", rank=str(rank))
