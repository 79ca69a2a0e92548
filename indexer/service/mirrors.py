"""Requests the state of ranks' mirrors over NATS, or their batches since a place.

    no subscriber at the rank's subject, or       `MirrorSilent`
    no further part of the answer in `answer_s`
    an answer                                     its state, or the messages since a place if the mirror retains
                                                  them and they are no larger than the state

One request at a time: the answer of a rank with a million blocks is 17 MB.
"""

import asyncio
from itertools import count

from indexer.follow.question import AnsweredState, AnswerParts
from kv_protocol import codec, recovery, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, RecoverRequest, ReplayChunk
from kv_runtime.event_log import EventLog, LogMessage


class MirrorSilent(Exception):
    """No complete answer came; the message names the rank and what came."""


class Mirrors:
    """Requests to all mirrors of a fleet; call `start` before the first one."""

    def __init__(self, log: EventLog, answer_s: float) -> None:
        self._event_log, self._answer_s = log, answer_s
        self._inbox = log.new_inbox()
        self._request_ids = count(1)
        self._open = _PartialAnswer(0)

    async def start(self) -> None:
        """Subscribe to answers."""
        await self._event_log.listen(f"{self._inbox}.*", self._on_answer)

    async def state(self, slug: str, rank: WorkerRank) -> AnsweredState:
        """Return the state of the rank's mirror; `slug` is its model's.

        Raises:
            MirrorSilent: no complete answer came.
            BrokerUnavailable: the log is away.
        """
        answer = await self._request(slug, rank, RecoverRequest(next(self._request_ids)))
        if answer.state is None:
            raise MirrorSilent(f"{rank}: the mirror sent single batches, its complete state was requested")
        return answer.state

    async def messages_since(self, slug: str, rank: WorkerRank, epoch: int, seq: int) -> list[bytes]:
        """Return the stream's messages behind `seq` up to now.

        There are none if the mirror does not retain all of them, or if they are larger than its state.

        Raises: as `state`.
        """
        answer = await self._request(slug, rank, RecoverRequest(next(self._request_ids), epoch, seq))
        return answer.replayed

    async def _request(self, slug: str, rank: WorkerRank, request: RecoverRequest) -> "_PartialAnswer":
        answer = self._open = _PartialAnswer(request.request_id, request.after_seq)
        reply = f"{self._inbox}.{request.request_id}"
        await self._event_log.announce(subjects.recover_slug(slug, rank), recovery.encode(request), reply)
        try:
            while not answer.is_complete:
                async with asyncio.timeout(self._answer_s):
                    await answer.moved.wait()
                answer.moved.clear()
                if answer.failure:
                    raise MirrorSilent(f"{rank}: {answer.failure}")
        except TimeoutError:
            raise MirrorSilent(
                f"{rank}: {answer.parts} parts of an answer, and then {self._answer_s:g} s none"
            ) from None
        return answer

    async def _on_answer(self, message: LogMessage) -> None:
        if message.subject.rpartition(".")[2] == str(self._open.request_id):
            self._open.take(message.data)


class _PartialAnswer:
    """The answer to one request, as far as it came."""

    def __init__(self, request_id: int, after_seq: int = 0) -> None:
        self.request_id = request_id
        self.state: AnsweredState | None = None
        self._dump = AnswerParts()
        self.replayed: list[bytes] = []
        self.moved = asyncio.Event()
        self.failure = ""
        self.parts = 0
        self.is_complete = False
        self._reached_seq = after_seq

    def take(self, data: bytes) -> None:
        """Take a part; without data the server reports that there is no subscriber."""
        try:
            if not data:
                self.failure = "no mirror listens"
            else:
                self._add(recovery.decode_answer(data))
        except MalformedMessage as error:
            self.failure = str(error)
        self.parts += 1
        if self.parts > recovery.DUMP_CHUNKS_MAX:
            self.failure = f"more than {recovery.DUMP_CHUNKS_MAX} parts of an answer"
        self.moved.set()

    def _add(self, part: Answer) -> None:
        if isinstance(part, ReplayChunk):
            if part.message:
                self.replayed.append(part.message)
                self._reached_seq = codec.decode_message(part.message)[-1].seq
            self.is_complete = self._reached_seq >= part.last_seq
        else:
            self._dump.add(part)
            self.state = self._dump.complete_answer()
            self.is_complete = self.state is not None
