"""The recovery question of one stream: what it asks for, when it may be sent, and its answer.

    wants     the blocks       sent with                  answered with
    ------    --------------   ------------------------   ---------------------------------------------------
    tail      are right        its place                  the batches after it, or all blocks
    repair    may be wrong     its place, its digests     the blocks of the buckets that differ, or all blocks
    dump      may be wrong     nothing                    all blocks

If the stream comes to want more (further down the table), the question is replaced; else it stays. A question is in
flight until its answer is complete, no new part came for `answer_s`, or `WHOLE_ANSWER_S` are over. A late answer is
taken until the next question is sent. The minimum time between two questions:

    no question since the last proof that the stream is right               0
    n questions in a row without answer, or n answers without proof         answer_s * 2^(n - 1), at most backoff_max_s

No question is sent before `not_before_s`: the log may still bring what is missing.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from kv_protocol.digest import is_in_buckets
from kv_protocol.recovery import BlockColumns, DumpChunk

Wants = Literal["tail", "repair", "dump"]
WHOLE_ANSWER_S = 60.0
"""A dump of many million blocks takes some seconds; unlimited, an endless one would keep others waiting."""
_MORE: dict[Wants | None, int] = {None: 0, "tail": 1, "repair": 2, "dump": 3}


class AnsweredState(NamedTuple):
    """A complete answer: the blocks of a rank after `last_seq` of `epoch`, in `buckets` (empty: in all)."""

    epoch: int
    last_seq: int
    buckets: bytes
    chunks: tuple[BlockColumns, ...]

    @property
    def keeps_to_its_buckets(self) -> bool:
        """Whether all of its blocks lie in its buckets."""
        top_bytes = {top_byte for chunk in self.chunks for top_byte in chunk.hashes[7::8]}
        return all(is_in_buckets(top_byte << 56, self.buckets) for top_byte in top_bytes)


class AnswerParts:
    """Joins the parts of an answer: in any order, with repeats, never of two answers.

    The first part decides which answer is joined (epoch, last seq, buckets, number of parts); parts of another one are
    ignored.
    """

    def __init__(self) -> None:
        self._parts: dict[int, DumpChunk] = {}

    def add(self, part: DumpChunk) -> bool:
        """Add a part; return whether it belongs to this answer and is new."""
        first = next(iter(self._parts.values()), part)
        answers = {(each.epoch, each.last_seq, each.of, each.buckets) for each in (first, part)}
        if len(answers) > 1 or part.chunk in self._parts:
            return False
        self._parts[part.chunk] = part
        return True

    def complete_answer(self) -> AnsweredState | None:
        """Return the answer; None while parts are missing."""
        first = next(iter(self._parts.values()), None)
        if first is None or len(self._parts) < first.of:
            return None
        chunks = tuple(self._parts[at].columns for at in range(first.of) if self._parts[at].tiers)
        return AnsweredState(first.epoch, first.last_seq, first.buckets, chunks)


class RecoveryQuestion:
    """The question of one stream. `request_ids` are unique among all questions of the fold."""

    def __init__(self, answer_s: float, backoff_max_s: float, request_ids: Iterator[int]) -> None:
        self._answer_s, self._backoff_max_s, self._request_ids = answer_s, backoff_max_s, request_ids
        self.wants: Wants | None = None
        """What the stream wants; None: nothing."""
        self.request_id = 0
        """The newest question's id; ids ascend."""
        self.after_seq = 0
        """The stream's cursor when the newest question was sent."""
        self.sent_at_s = 0.0
        self.progress_at_s = 0.0
        """When the newest part of its answer came."""
        self._unanswered_s = self._unproven_s = 0.0
        self.not_before_s = 0.0
        """The next question is not due before this time."""
        self._is_open = False
        self._parts = AnswerParts()

    def want(self, wants: Wants, not_before_s: float) -> bool:
        """Want this, if it is more than the stream wanted before; return whether it is."""
        if _MORE[wants] <= _MORE[self.wants]:
            return False
        self.end()
        self.wants = wants
        self.not_before_s = not_before_s
        return True

    def on_answered(self) -> None:
        """Close the answered question; the pause before the next grows until a heartbeat proves the stream right."""
        self._unanswered_s, self._unproven_s = 0.0, self._longer(self._unproven_s)
        self.end()

    def _longer(self, pause_s: float) -> float:
        return min(max(self._answer_s, 2 * pause_s), self._backoff_max_s)

    def end(self) -> None:
        """Close the question: the stream wants nothing."""
        self.wants, self._is_open = None, False
        self._parts = AnswerParts()

    def on_proof(self) -> None:
        """Forget all pauses: the stream is right, so its next question may be sent at once."""
        self._unanswered_s = self._unproven_s = 0.0

    def is_in_flight(self, now_s: float) -> bool:
        """Return whether an answer is awaited."""
        is_in_time = now_s - self.sent_at_s < WHOLE_ANSWER_S
        return self._is_open and is_in_time and now_s - self.progress_at_s < self._answer_s

    def is_due(self, now_s: float) -> bool:
        """Return whether a question is to be sent now."""
        pause_s = max(self._unanswered_s, self._unproven_s)
        is_early = now_s < self.not_before_s or now_s - self.sent_at_s < pause_s
        return self.wants is not None and not self.is_in_flight(now_s) and not is_early

    def begin(self, after_seq: int, now_s: float) -> int:
        """Return the id of a new question, sent now, which replaces the former one. The stream must want something."""
        assert self.wants is not None
        self.request_id = next(self._request_ids)
        self.after_seq = after_seq
        self.sent_at_s = self.progress_at_s = now_s
        self._unanswered_s = self._longer(self._unanswered_s)
        self._is_open = True
        self._parts = AnswerParts()
        return self.request_id

    def expects(self, request_id: int) -> bool:
        """Return whether the question of this id is open."""
        return self._is_open and request_id == self.request_id

    def collect(self, part: DumpChunk, now_s: float) -> AnsweredState | None:
        """Add a part of the answer; return the answer if this part completes it, else None."""
        if not self._parts.add(part):
            return None
        self.progress_at_s = now_s
        return self._parts.complete_answer()
