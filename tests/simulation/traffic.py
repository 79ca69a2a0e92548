"""What may be sent to a reader of streams: the log once, and for each question the least that answers it.

    log       every message of the log once; twice where the network doubles messages
    answer    the bytes of its batches, or 17 bytes for each of its blocks; at most:

    the question          the reader's place                           at most
    -------------------   ------------------------------------------   ---------------------------------------------
    any                   repeats a question that is younger than      nothing
                            `answer_s` and was not answered
    tail                  behind it is a batch younger than `gap_s`,   nothing; but where seqs may be wrong, the tail
                            which the log may still bring                may be wanted because of one of these
    any                   in another epoch, or beyond the rank's       all blocks
                            last seq
    all                   at seq 0                                     all blocks
    tail                  any other                                    the batches behind it, where they are kept and
                                                                         are no larger than all blocks; else all blocks
    repair                any other                                    the blocks of the buckets that differ
    all, with no repair   any other                                    as for a tail
      before it
    all, after a repair   any other                                    all blocks

ADR 11 derives it. It is computed from what the world knows, when the question arrives at the rank. A question that the
network doubles may be answered twice.
"""

from typing import NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, DumpChunk, HeldBlock, RecoverRequest, ReplayChunk
from worker_agent.events.consolidation import Consolidation

_COUNT_BYTES, _HEAD_BYTES, _BLOCK_BYTES = 2, 52, 8
_ROW_BYTES = 17
_ROUNDING_S = 1e-6
_ENVELOPE_BYTES = 256
"""What a dump's fields take beside its rows: by so much a replay may be larger."""


def batches_of(message: bytes) -> int:
    """Return how many batches a message has."""
    return int.from_bytes(message[:_COUNT_BYTES], "little")


def blocks_of(message: bytes) -> int:
    """Return what the batches of a message count; of one that is cut, as much as is there."""
    batches = batches_of(message)
    return max(batches, (len(message) - _COUNT_BYTES - batches * _HEAD_BYTES) // _BLOCK_BYTES)


class Traffic:
    """What was delivered to one life of an index since it began, in blocks. A batch counts as one block at least."""

    def __init__(self) -> None:
        self.questions = 0
        self.logged = self.replayed = self.dumped = 0

    def __repr__(self) -> str:
        return (
            f"{self.logged} by the log, {self.replayed} by replays, {self.dumped} by dumps, {self.questions} questions"
        )

    def on_message(self, data: bytes) -> None:
        """A message of the log was delivered."""
        self.logged += blocks_of(data)

    def on_answer(self, answer: Answer) -> None:
        """Part of an answer was delivered."""
        if isinstance(answer, ReplayChunk):
            self.replayed += blocks_of(answer.message)
        else:
            self.dumped += len(answer.tiers)

    @property
    def blocks(self) -> int:
        """All that was delivered."""
        return self.logged + self.replayed + self.dumped


class Reader(NamedTuple):
    """A reader that sends a question: where its answers go, its place in the rank's stream, and what it holds there.

    `stream` is another object once the reader has forgotten the rank and admitted it again; `beginnings` is how many
    answers it has used, and how many restarts of the rank it has seen, since.
    """

    inbox: str
    stream: object
    beginnings: int
    epoch: int
    seq: int
    held: frozenset[HeldBlock]


class _Question(NamedTuple):
    reader: Reader
    request: RecoverRequest
    at_s: float
    is_needed: bool
    follows_repair: bool
    """Whether the same reader has requested a repair of this epoch before."""

    @property
    def wants(self) -> str:
        return "repair" if self.request.buckets else "tail" if self.request.epoch else "all"

    def __repr__(self) -> str:
        need = "" if self.is_needed else ", without need"
        return f"{self.wants} at {self.reader.seq} of {self.reader.epoch}{need}"


class Answers:
    """The questions of all readers, and what the ranks send for them. A request id is unique at its inbox."""

    def __init__(self, gap_s: float, answer_s: float) -> None:
        self._gap_s, self._answer_s = gap_s, answer_s
        self._numbered_at_s: dict[tuple[WorkerRank, int], dict[int, float]] = {}
        self._newest: dict[tuple[str, WorkerRank], _Question] = {}
        self._questions: dict[tuple[str, int], _Question] = {}
        self._left: dict[tuple[str, int], int] = {}

    def on_numbered(self, rank: WorkerRank, epoch: int, seq: int, now_s: float) -> None:
        """The rank has given numbers up to `seq`."""
        self._numbered_at_s.setdefault((rank, epoch), {}).setdefault(seq, now_s)

    def on_question(self, reader: Reader, rank: WorkerRank, request: RecoverRequest, now_s: float) -> None:
        """A reader sends a question."""
        former = self._newest.get((reader.inbox, rank))
        follows_repair = (
            former is not None
            and (former.reader.stream, former.reader.epoch) == (reader.stream, reader.epoch)
            and (former.wants == "repair" or former.follows_repair)
        )
        question = _Question(reader, request, now_s, is_needed=True, follows_repair=follows_repair)
        if self._is_repetition(question, former) or (question.wants == "tail" and self._may_come(question, rank)):
            question = question._replace(is_needed=False)
        self._newest[reader.inbox, rank] = self._questions[reader.inbox, request.request_id] = question

    def _is_repetition(self, question: _Question, former: _Question | None) -> bool:
        is_young = former is not None and question.at_s - former.at_s < self._answer_s - _ROUNDING_S
        return is_young and former is not None and (former.reader, former.wants) == (question.reader, question.wants)

    def _may_come(self, question: _Question, rank: WorkerRank) -> bool:
        """Return whether the next batch is so young that the log may still bring it."""
        numbered = self._numbered_at_s.get((rank, question.reader.epoch), {})
        next_at_s = next((at_s for seq, at_s in numbered.items() if seq > question.reader.seq), None)
        return next_at_s is not None and question.at_s - next_at_s < self._gap_s - _ROUNDING_S

    def on_begin(self, inbox: str, rank: WorkerRank, request: RecoverRequest, source: Consolidation) -> None:
        """The rank begins to answer a question."""
        question = self._questions[inbox, request.request_id]
        self._left[inbox, request.request_id] = _least_bytes(question, rank, source) if question.is_needed else 0

    def on_part(self, inbox: str, rank: WorkerRank, part: Answer) -> None:
        """The rank sends a part of the answer that it began last for that question.

        Raises:
            AssertionError: all parts so far are more than the least that answers it.
        """
        key, part_bytes = (inbox, part.request_id), _bytes_of(part)
        left = self._left[key]
        assert part_bytes <= left, f"{inbox}: {rank}: {part_bytes} bytes sent, {left} allowed, {self._questions[key]}"
        self._left[key] = left - part_bytes


def _least_bytes(question: _Question, rank: WorkerRank, source: Consolidation) -> int:
    reader, outbox = question.reader, source.outboxes[rank.dp_rank]
    held = frozenset(source.mirrors[rank.dp_rank].dump())
    all_bytes = _ROW_BYTES * len(held)
    needs_all = question.wants == "all" and (reader.seq == 0 or question.follows_repair)
    if needs_all or reader.epoch != outbox.epoch or reader.seq > outbox.last_seq:
        return all_bytes
    if question.wants == "repair":
        differing = {_bucket(block) for block in held ^ reader.held}
        return _ROW_BYTES * sum(_bucket(block) in differing for block in held)
    tail = outbox.tail(reader.seq, 1 << 30)
    tail_bytes = None if tail is None else sum(len(message) - _COUNT_BYTES for message in tail)
    return all_bytes if tail_bytes is None or tail_bytes > all_bytes + _ENVELOPE_BYTES else tail_bytes


def _bucket(block: HeldBlock) -> int:
    return block.sequence_hash >> 56


def _bytes_of(part: Answer) -> int:
    if isinstance(part, DumpChunk):
        return _ROW_BYTES * len(part.tiers)
    return max(0, len(part.message) - _COUNT_BYTES)
