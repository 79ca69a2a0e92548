"""Answers of one rank's consolidation to readers of its stream: one asker at a time, part by part.

Between two parts others have their turn; a question that its asker gave up is not answered to its end.
"""

from collections.abc import Iterator

from kv_protocol import recovery
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, DumpChunk
from tests.simulation.connection import Connection
from tests.simulation.timeline import Timeline
from tests.simulation.traffic import Answers
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.recoveries import PendingRecovery, Questions


class Answering:
    """From its making until the connection is closed. `part_s` lie between two parts."""

    def __init__(
        self,
        rank: WorkerRank,
        core: Consolidation,
        connection: Connection,
        timeline: Timeline,
        part_s: float,
        answers: Answers,
    ) -> None:
        self._rank, self._core, self._connection, self._timeline = rank, core, connection, timeline
        self._part_s, self._answers = part_s, answers
        self._questions = Questions()
        self._is_answering = False
        self._told: set[int] = set()
        self._newest: dict[str, int] = {}
        connection.listen(f"recover {rank}", self._on_question)

    def _on_question(self, _: WorkerRank, data: bytes, reply: str) -> None:
        try:
            question = PendingRecovery(reply, recovery.decode_recover_request(data))
        except MalformedMessage:
            return
        newest, request_id = self._newest.get(reply, 0), question.request.request_id
        self._newest[reply] = max(newest, request_id)
        fate = self._questions.ask(question)
        # the newest, told twice, may take the place of an earlier one that came between
        assert fate != "replaced" or request_id >= newest, f"{self._rank}: {request_id} took the place of {newest}"
        if not self._is_answering:
            self._next()

    def _next(self) -> None:
        question = self._questions.next()
        self._is_answering = question is not None
        if question is not None:
            self._told.clear()
            self._answers.on_begin(question.asker, self._rank, question.request, self._core)
            self._go_on(question, iter(self._core.recover(self._rank.dp_rank, question.request)))

    def _go_on(self, question: PendingRecovery, parts: Iterator[Answer]) -> None:
        part = next(parts, None) if self._questions.is_current(question) else None
        if part is None:
            self._next()
            return
        if isinstance(part, DumpChunk):
            self._check(part)
        if self._connection.is_connected:
            self._answers.on_part(question.asker, self._rank, part)
        self._connection.announce(question.asker, self._rank, recovery.encode(part))
        self._timeline.after(self._part_s, lambda: self._go_on(question, parts))

    def _check(self, part: DumpChunk) -> None:
        """Parents come before their children, over the whole answer."""
        for block in part.blocks():
            assert block.sequence_hash not in self._told, f"{self._rank}: a block is told of after its child, or twice"
            self._told.update({block.sequence_hash} if block.parent is None else {block.sequence_hash, block.parent})
