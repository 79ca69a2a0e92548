"""The question that a stream asks when it lacks batches: when it may be sent, and what came of it.

    wants     what is held     asked with                 answered with
    ------    --------------   ------------------------   ---------------------------------------------------
    tail      is right         its place                  the batches behind it, or all blocks
    repair    may be wrong     its place, its digests     the blocks of the buckets that differ, or all blocks
    dump      may be wrong     nothing                    all blocks

Who wants more (further down) asks anew, and the former question is void; who wants less has asked already. A question
is in flight until its answer is whole, or nothing new of it came for `answer_s`; but until another one is asked, a late
answer is welcome. Two questions lie so far apart, at least:

    nothing was asked since the last proof that the stream is right         0
    n questions in a row had no answer, or n answers since were no proof    answer_s * 2^(n - 1), at most backoff_max_s

No question is sent before the time that its cause allows (`not_before_s`): the log may still bring what is missing.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from indexer.follow.answer_parts import AnswerParts, RankState
from kv_protocol.recovery import DumpChunk

Wants = Literal["tail", "repair", "dump"]
_MORE: dict[Wants | None, int] = {None: 0, "tail": 1, "repair": 2, "dump": 3}


class Ask(msgspec.Struct, frozen=True):
    """To be sent to the rank's consolidator: a question for what the stream wants."""

    request_id: int
    wants: Wants


class RecoveryQuestion:
    """What one stream asks. `request_ids` are numbers that no other question of the same asker has."""

    def __init__(self, answer_s: float, backoff_max_s: float, request_ids: Iterator[int]) -> None:
        self._answer_s, self._backoff_max_s, self._request_ids = answer_s, backoff_max_s, request_ids
        self.wants: Wants | None = None
        """What the stream lacks; None: nothing."""
        self.request_id = 0
        """Of the newest question; they grow."""
        self.after_seq = 0
        """The stream's place when the newest question was asked."""
        self.asked_at_s = 0.0
        self._heard_at_s = 0.0
        self._unanswered_s = self._unproven_s = 0.0
        self._not_before_s = 0.0
        self._is_open = False
        self._parts = AnswerParts()

    def want(self, wants: Wants, not_before_s: float) -> bool:
        """The stream lacks so much; return whether that is more than it was known to lack."""
        if _MORE[wants] <= _MORE[self.wants]:
            return False
        self.end()
        self.wants = wants
        self._not_before_s = not_before_s
        return True

    def wait_until(self, not_before_s: float) -> None:
        """The next question is not due before this time."""
        self._not_before_s = not_before_s

    def on_answered(self) -> None:
        """The answer came, and the stream lacks nothing; whether that is so is still to be proven."""
        self._unanswered_s, self._unproven_s = 0.0, self._longer(self._unproven_s)
        self.end()

    def _longer(self, pause_s: float) -> float:
        return min(max(self._answer_s, 2 * pause_s), self._backoff_max_s)

    def end(self) -> None:
        """The stream lacks nothing; what was asked is void."""
        self.wants, self._is_open = None, False
        self._parts.clear()

    def begin_anew(self) -> None:
        """Another life of the stream: it lacks nothing, and its first question needs no pause."""
        self.end()
        self.on_proof()

    def on_proof(self) -> None:
        """The stream is right: the next question needs no pause."""
        self._unanswered_s = self._unproven_s = 0.0

    def is_in_flight(self, now_s: float) -> bool:
        """Return whether an answer is waited for."""
        return self._is_open and now_s - self._heard_at_s < self._answer_s

    def is_due(self, now_s: float) -> bool:
        """Return whether something is to be asked now."""
        pause_s = max(self._unanswered_s, self._unproven_s)
        is_early = now_s < self._not_before_s or now_s - self.asked_at_s < pause_s
        return self.wants is not None and not self.is_in_flight(now_s) and not is_early

    def ask(self, after_seq: int, now_s: float) -> Ask:
        """The question for what the stream wants is in flight, and no former one; something is wanted."""
        assert self.wants is not None
        self.request_id = next(self._request_ids)
        self.after_seq = after_seq
        self.asked_at_s = self._heard_at_s = now_s
        self._unanswered_s = self._longer(self._unanswered_s)
        self._is_open = True
        self._parts.clear()
        return Ask(self.request_id, self.wants)

    def expects(self, request_id: int) -> bool:
        """Return whether this is what is waited for."""
        return self._is_open and request_id == self.request_id

    def hear(self, now_s: float) -> None:
        """Something new of the answer came."""
        self._heard_at_s = now_s

    def collect(self, part: DumpChunk, now_s: float) -> RankState | None:
        """Return the whole answer once this part completes it."""
        if not self._parts.add(part):
            return None
        self.hear(now_s)
        return self._parts.whole()
