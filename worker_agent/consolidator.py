"""Hop A to hop B: one worker's publishers folded into its ranks' mirrors, and the ranks' streams put into the log.

Parts of a process (see `kv_runtime.supervise`): the publishers' readers, publishing per rank, pulse. It answers for its
ranks: every second with a heartbeat that proves the set, on request with a dump.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from kv_protocol import fleet, recovery, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.supervise import Part, until
from worker_agent.core.consolidation import Consolidation, Origin
from worker_agent.core.mirror import ENGINE
from worker_agent.core.source_cursor import Delivery
from worker_agent.hop_a_reader import HopAReader

_RETRY_S = 0.1
_RETRY_MAX_S = 2.0

_log = structlog.get_logger("consolidator")


class Consolidator:
    """One worker's ranks on their way into the log. `source_stale` says why a source itself doubts what it tells."""

    def __init__(
        self,
        core: Consolidation,
        readers: Sequence[HopAReader],
        log: EventLog,
        clock: Clock,
        *,
        model: str,
        worker_id: str,
        source_stale: Callable[[int], str] | None = None,
    ) -> None:
        self._core, self._readers, self._event_log, self._clock = core, tuple(readers), log, clock
        self._model, self._worker_id = model, worker_id
        self._source_stale = source_stale
        self._told_stale: dict[int, str] = {}
        self._to_publish = {dp_rank: asyncio.Event() for dp_rank in core.dp_ranks}
        self.refused_requests_total = self.publish_failures_total = self.dumps_total = 0

    @property
    def worker_id(self) -> str:
        """The worker whose ranks these are."""
        return self._worker_id

    @property
    def core(self) -> Consolidation:
        """The state, for its statistics."""
        return self._core

    @property
    def readers(self) -> tuple[HopAReader, ...]:
        """The publishers, for their counts."""
        return self._readers

    def stale(self, dp_rank: int) -> str:
        """Return why the rank's set may be wrong; empty when nothing speaks against it."""
        return self._core.heartbeat(dp_rank, self._unread(dp_rank)).stale

    def parts(self, first_stage: int) -> list[Part]:
        """Return what is to run, in four stages: live intake stops before the replays it asks for, the pulse last."""
        prefix = f"{self._worker_id}-"
        return [
            *(part for reader in self._readers for part in reader.parts(self._fold, first_stage, prefix=prefix)),
            *(
                Part(f"{prefix}publish-{rank}", partial(self._publish, rank), first_stage + 2)
                for rank in self._core.dp_ranks
            ),
            Part(f"{prefix}pulse", self._pulse, first_stage + 3),
        ]

    async def start(self) -> None:
        """Dumps are answered, and readers know of the new epochs."""
        for dp_rank in self._core.dp_ranks:
            await self._event_log.listen(subjects.recover(self._model, self._rank(dp_rank)), self._answer_dump)
        await self._beat()

    async def position(self, sequence: int, source: str = ENGINE) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq), once the source's only publisher was read up to before `sequence`."""
        (reader,) = [reader for reader in self._readers if reader.origin.source == source]
        await reader.until_read(sequence)
        return {rank: (self._core.outbox(rank).epoch, self._core.outbox(rank).last_seq) for rank in self._core.dp_ranks}

    def _rank(self, dp_rank: int) -> WorkerRank:
        return WorkerRank(self._worker_id, dp_rank)

    async def _fold(self, origin: Origin, delivery: Delivery) -> None:
        changed = self._core.on_loss(origin, began_anew=delivery.began_anew) if delivery.lost else set[int]()
        for sequence, payload in delivery.payloads:
            changed |= self._core.on_payload(sequence, payload, origin)
        for dp_rank in changed:
            self._to_publish[dp_rank].set()

    async def _publish(self, dp_rank: int, stop: asyncio.Event) -> None:
        changed = self._to_publish[dp_rank]
        while not stop.is_set():
            await until(stop, changed.wait())
            changed.clear()
            await self._drain_outbox(dp_rank, stop)

    async def _drain_outbox(self, dp_rank: int, stop: asyncio.Event) -> None:
        retry_s = _RETRY_S
        rank, outbox = self._rank(dp_rank), self._core.outbox(dp_rank)
        while (message := outbox.next_message()) is not None:
            try:
                await self._event_log.publish(
                    subjects.events(self._model, rank),
                    message.payload,
                    subjects.message_id(rank, outbox.epoch, message.first_seq),
                )
            except BrokerUnavailable as error:
                self.publish_failures_total += 1
                tell = _log.warning if retry_s == _RETRY_S else _log.debug  # once, however long it takes
                tell("publish_failed", rank=str(rank), seq=message.first_seq, reason=str(error))
                if stop.is_set():
                    return
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
            else:
                outbox.acknowledge()
                retry_s = _RETRY_S

    async def _pulse(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._beat()
            await until(stop, self._clock.sleep(HEARTBEAT_PERIOD_S))

    async def _beat(self) -> None:
        for dp_rank in self._core.dp_ranks:
            heartbeat = self._core.heartbeat(dp_rank, self._unread(dp_rank))
            self._tell_stale(dp_rank, heartbeat.stale)
            pulse = fleet.encode(heartbeat)
            try:
                await self._event_log.announce(subjects.heartbeat(self._model, self._rank(dp_rank)), pulse)
            except BrokerUnavailable as error:
                _log.debug("heartbeat_lost", reason=str(error))

    def _unread(self, dp_rank: int) -> str:
        """Return why something may not have come to the core at all."""
        reasons = [reader.stale() for reader in self._readers if dp_rank in self._core.ranks_of(reader.origin)]
        if self._source_stale is not None:
            reasons.append(self._source_stale(dp_rank))
        return "; ".join(filter(None, reasons))

    def _tell_stale(self, dp_rank: int, reason: str) -> None:
        """Log when the rank becomes stale and when it is current again; reasons may change with every pulse."""
        told = self._told_stale.get(dp_rank, "")
        self._told_stale[dp_rank] = reason
        rank = str(self._rank(dp_rank))
        if reason and not told:
            _log.warning("rank_stale", rank=rank, reason=reason)
        elif told and not reason:
            _log.info("rank_current", rank=rank)

    async def _answer_dump(self, message: LogMessage) -> None:
        try:
            request = recovery.decode_dump_request(message.data)
            dp_rank = subjects.rank_of(message.subject).dp_rank
        except MalformedMessage as error:
            self.refused_requests_total += 1
            _log.warning("dump_request_refused", rank=message.subject, reason=str(error))
            return
        self.dumps_total += 1
        try:
            for chunk in self._core.dump(dp_rank, request.request_id):
                await self._event_log.announce(message.reply, recovery.encode(chunk))
        except BrokerUnavailable as error:
            _log.warning("dump_cut_short", rank=message.subject, reason=str(error))
