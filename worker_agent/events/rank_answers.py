"""Answers readers of one rank's stream that lack batches: one reader at a time.

An answer shows the state at its beginning; between its parts other tasks run. `recoveries.py` has the queue and decides
when an answer is obsolete.
"""

import asyncio
from collections import Counter
from typing import Literal

import structlog

from kv_protocol import recovery, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.supervise import until
from kv_runtime.telemetry import RateLimitedLog
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.recoveries import Kind, PendingRecovery, Questions, kind_of

RefusalCause = Literal["unreadable", "no_reply", "full"]

_log = structlog.get_logger("rank_answers")


class RankAnswers:
    """Answers one rank's readers, as a part of a process (`run`), which must begin only after `listen` has returned."""

    def __init__(self, model: str, rank: WorkerRank, core: Consolidation, log: EventLog, clock: Clock) -> None:
        self._rank, self._core, self._event_log, self._clock = rank, core, log, clock
        self._refusals = RateLimitedLog(_log, clock)
        self._subject = subjects.recover(model, rank)
        self._questions = Questions()
        self._question_arrived = asyncio.Event()
        self.answered_total: Counter[Kind] = Counter()
        self.bytes_total: Counter[Kind] = Counter()
        self.refused_total = 0
        """Questions that were unreadable, had no reply subject, or found the queue full."""
        self.dropped_total = 0
        """Questions that were repeated or late, or that a later question of the same asker replaced."""

    async def listen(self) -> None:
        """Accept questions; those that come before `run` wait for it."""
        await self._event_log.listen(self._subject, self._on_question)

    async def run(self, stop: asyncio.Event) -> None:
        """Answer until `stop` is set."""
        while not stop.is_set():
            self._question_arrived.clear()
            while not stop.is_set() and (question := self._questions.next()) is not None:
                await self._answer(question)
            await until(stop, self._question_arrived.wait())

    async def _on_question(self, message: LogMessage) -> None:
        try:
            question = PendingRecovery(message.reply, recovery.decode_recover_request(message.data))
        except MalformedMessage as error:
            self._refuse("unreadable", str(error))
            return
        if not message.reply:
            self._refuse("no_reply", "it says nowhere to answer")
            return
        outcome = self._questions.ask(question)
        if outcome == "turned_away":
            self._refuse("full", "too many wait")
        self.dropped_total += outcome in ("replaced", "dropped")
        self._question_arrived.set()

    def _refuse(self, cause: RefusalCause, reason: str) -> None:
        self.refused_total += 1
        self._refusals.warning("recover_request_refused", key=cause, rank=str(self._rank), reason=reason)

    async def _answer(self, question: PendingRecovery) -> None:
        try:
            for part in self._core.recover(self._rank.dp_rank, question.request):
                kind, data = kind_of(part), recovery.encode(part)
                await self._event_log.announce(question.asker, data)
                self.bytes_total[kind] += len(data)
                await self._clock.sleep(0)
                if not self._questions.is_current(question):
                    return
        except BrokerUnavailable as error:
            _log.warning("answer_cut_short", rank=str(self._rank), reason=str(error))
            return
        self.answered_total[kind] += 1
        _log.info("recovery_answered", rank=str(self._rank), kind=kind, epoch=part.epoch, last_seq=part.last_seq)
