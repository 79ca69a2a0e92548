"""Sends one rank's outbox to the log: in order, several messages unacknowledged.

    the log confirms       acknowledged; the next message may be sent
    the log refuses, or    every unacknowledged message is published again after 0.1 s (doubled up to 2 s), with
      is unreachable         the same ids: the log drops duplicates. One message is sent first; once the log confirms
                             it, the others follow

While the server is away, slow, full or without the stream, the outbox may drop batches. The failure is logged once.
"""

import asyncio
from functools import partial

import structlog

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import until
from kv_runtime.tracing.service import EventTracing
from worker_agent.events.outbox import Outbox, OutMessage
from worker_agent.events.tracing import rank_tracer

_RETRY_S = 0.1
_RETRY_MAX_S = 2.0

_log = structlog.get_logger("rank_stream")


class RankStreamSender:
    """A part of a process, `run`; `wake` signals new batches in the outbox."""

    def __init__(
        self,
        model: str,
        rank: WorkerRank,
        outbox: Outbox,
        log: EventLog,
        clock: Clock,
        *,
        tracing: EventTracing | None = None,
    ) -> None:
        """`tracing`: None: the way of messages is not traced."""
        self._rank, self._outbox, self._event_log, self._clock = rank, outbox, log, clock
        self._subject = subjects.events(model, rank)
        self._tracer = rank_tracer(tracing, rank, self._subject)
        self._moved = asyncio.Event()
        self._failure: BaseException | None = None
        self._attempt = 0
        self._retry_s = _RETRY_S
        self.is_refused = self._is_ahead = False
        """Whether the log has confirmed no message since the last failed publication; whether one was sent since."""
        self.failures_total = 0
        """Publications not confirmed by the log."""

    def wake(self) -> None:
        """Signal that the outbox has new batches."""
        if self._tracer is not None:
            self._tracer.arrived(self._outbox.last_seq)
        self._moved.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until `stop` is set, and then the rest, unless the log does not confirm it."""
        while True:
            self._moved.clear()
            await self._publish()
            if self._failure is not None:
                if stop.is_set():
                    return
                await self._go_back(self._failure, stop)
            elif not stop.is_set():
                await until(stop, self._moved.wait())
            elif self._outbox.waiting_bytes:
                await self._moved.wait()
            else:
                return

    async def _publish(self) -> None:
        while self._failure is None and not self._is_ahead and (message := self._outbox.next_message()) is not None:
            self._is_ahead = self.is_refused
            message_id = subjects.message_id(self._rank, self._outbox.epoch, message.first_seq)
            if self._tracer is not None:
                self._tracer.sending(self._outbox.epoch, message)
            try:
                confirmed = await self._event_log.send(self._subject, message.payload, message_id)
            except BrokerUnavailable as error:
                self._fail(message, error)
            else:
                confirmed.add_done_callback(partial(self._ended, message, self._attempt))

    def _ended(self, message: OutMessage, attempt: int, confirmed: "asyncio.Future[int]") -> None:
        error = confirmed.exception()
        if error is None:
            self._outbox.acknowledge(message)
            if self._tracer is not None:
                self._tracer.confirmed(message)
            self._succeed()
        elif attempt == self._attempt:
            self._fail(message, error)
        self._moved.set()

    def _succeed(self) -> None:
        if self._failure is not None:  # of another message: everything is published again anyway
            return
        self._retry_s = _RETRY_S
        if self.is_refused:
            self.is_refused = self._is_ahead = False
            _log.info("published_again", rank=str(self._rank), seq=self._outbox.published_seq)

    def _fail(self, message: OutMessage, error: BaseException) -> None:
        self._failure = error
        self.failures_total += 1
        log = _log.debug if self.is_refused else _log.warning
        self.is_refused = True
        log("publish_failed", rank=str(self._rank), seq=message.first_seq, reason=str(error))

    async def _go_back(self, failure: BaseException, stop: asyncio.Event) -> None:
        if not isinstance(failure, BrokerUnavailable):
            raise failure
        await self._clock.wait(stop, self._retry_s)
        self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
        self._attempt += 1
        self._failure, self._is_ahead = None, False
        self._outbox.go_back()
