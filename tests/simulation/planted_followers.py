"""Planted bugs of readers that follow a stream: what comes, what is asked, what is answered."""

from collections.abc import Callable, Iterator

import msgspec

from indexer.follow.answer_parts import AnsweredState, AnswerParts
from indexer.follow.effects import ApplyEvent, Effect
from indexer.follow.fold import IndexFold
from indexer.follow.follower import AHEAD_MAX, FollowerLimits, StreamFollower, StreamState
from indexer.follow.inputs import Question
from indexer.follow.question import RecoveryQuestion, Wants
from kv_protocol.digest import TierDigest
from kv_protocol.events import Batch, Tier
from kv_protocol.recovery import DumpChunk
from tests.simulation.planted import Planted
from tests.support.planting import inside, plant


class AppliesOverGaps(StreamFollower):
    """Takes the next batch that comes for the next one."""

    def on_batch(self, batch: Batch, now_s: float) -> list[Effect]:
        if self._phase is StreamState.LIVE and batch.epoch == self._epoch and batch.seq > self._cursor:
            return [self._step(batch)]
        return super().on_batch(batch, now_s)


class AppliesTwice(StreamFollower):
    """Forgets what it has applied."""

    def _take(self, batch: Batch, now_s: float) -> list[Effect]:
        return [ApplyEvent(batch.event)] if batch.seq <= self._cursor else super()._take(batch, now_s)


class KeepsBlocksOverEpochs(StreamFollower):
    """Merges a new epoch with the old one."""

    def _adopt(self, epoch: int, now_s: float) -> list[Effect]:
        super()._adopt(epoch, now_s)
        return []


class NeverMissesTheLast(StreamFollower):
    """Takes a batch for lost only when a later one comes."""

    def tick(self, now_s: float) -> None:
        self.restart_timeouts(now_s)


class BelievesAnyDigest(StreamFollower):
    """Compares nothing."""

    def prove(self, digest_of: Callable[[Tier], TierDigest], now_s: float) -> None:
        del digest_of, now_s
        self._heartbeats.claim = None


class BelievesJumps(StreamFollower):
    """Takes any seq that a batch has for its own."""

    def _take(self, batch: Batch, now_s: float) -> list[Effect]:
        if batch.seq > self._cursor + AHEAD_MAX and self._phase is StreamState.LIVE:
            return [self._step(batch)]
        return super()._take(batch, now_s)


class WaitsForWhatCame(StreamFollower):
    """Lets the late answer to a question replace what closed the hole by itself."""

    def _settle(self, now_s: float, answered_seq: int | None = None) -> list[Effect]:
        is_open, request_id = inside(self._question, "_is_open"), self._question.request_id
        effects = super()._settle(now_s, answered_seq)
        is_open = is_open and answered_seq is None and request_id == self._question.request_id
        plant(self._question, "_is_open", is_open)
        return effects


class RequestsGapsAtOnce(StreamFollower):
    """Requests what the log itself may still bring."""

    def __init__(self, limits: FollowerLimits | None = None, request_ids: Iterator[int] | None = None) -> None:
        super().__init__(msgspec.structs.replace(limits or FollowerLimits(), gap_s=0.0), request_ids)


class RequestsAllForAGap(StreamFollower):
    """Requests all blocks where batches are missing."""

    def _recover(self, wants: Wants, since_s: float, *, hole_end: int = 0) -> None:
        super()._recover("dump" if wants == "tail" else wants, since_s, hole_end=hole_end)


class RequestsAllForADoubt(StreamFollower):
    """Requests all blocks where those of some buckets would do."""

    def _recover(self, wants: Wants, since_s: float, *, hole_end: int = 0) -> None:
        super()._recover("dump" if wants == "repair" else wants, since_s, hole_end=hole_end)


class RestoresOneAhead(StreamFollower):
    """Takes the batch after a checkpoint for applied."""

    def begin_at(self, epoch: int, seq: int, logged_seq: int) -> None:
        super().begin_at(epoch, seq + 1, logged_seq)


class PartsOfAnyAnswer(AnswerParts):
    """Forgets none before all of some answer came."""

    def clear(self) -> None:
        pass

    def add(self, part: DumpChunk) -> bool:
        first = next(iter(self._parts.values()), part)
        as_if = {"epoch": first.epoch, "last_seq": first.last_seq, "of": first.of, "buckets": first.buckets}
        return part.chunk < first.of and super().add(msgspec.structs.replace(part, **as_if))

    def complete_answer(self) -> AnsweredState | None:
        if (state := super().complete_answer()) is not None:
            self._parts.clear()
        return state


class MixesAnswers(RecoveryQuestion):
    """Puts parts of answers to old questions together with those of the newest."""

    def __init__(self, answer_s: float, backoff_max_s: float, request_ids: Iterator[int]) -> None:
        super().__init__(answer_s, backoff_max_s, request_ids)
        self._parts = PartsOfAnyAnswer()

    def expects(self, request_id: int) -> bool:
        return self._is_open and request_id <= self.request_id


class TakesLateAnswers(RecoveryQuestion):
    """Hears an answer to whatever was asked, even once nothing is asked any more, or another thing."""

    def expects(self, request_id: int) -> bool:
        return 0 < request_id <= self.request_id


class NeverAsksAgain(RecoveryQuestion):
    """Waits for an answer for ever."""

    def is_in_flight(self, now_s: float) -> bool:
        return self._is_open and now_s >= 0


class KeepsQuestionsOverEpochs(RecoveryQuestion):
    """Goes on to wait for what it asked of another epoch."""

    def reset(self) -> None:
        self.on_proof()


class NeverForgivesPauses(RecoveryQuestion):
    """Waits longer before each question than before the last one, whatever was proven since."""

    def on_answered(self) -> None:
        unanswered_s = self._unanswered_s
        super().on_answered()
        self._unanswered_s = unanswered_s

    def on_proof(self) -> None:
        pass

    def _longer(self, pause_s: float) -> float:
        return max(self._answer_s, 4 * pause_s)


class NeverPauses(RecoveryQuestion):
    """Asks again as long as there is no answer."""

    def is_in_flight(self, now_s: float) -> bool:
        return self._is_open and now_s < self.sent_at_s

    def is_due(self, now_s: float) -> bool:
        return self.wants is not None and now_s >= 0


def is_current_without_log(stale: str) -> str:
    """Take what was current when the log was lost for current."""
    return stale


class NeverMissesARank(IndexFold):
    """Takes silence for life."""

    def tick(self, now_s: float) -> list[Question]:
        for stream in self._ranks.values():
            stream.alive_at_s = now_s
        return super().tick(now_s)


WITHOUT_LOG = "indexer.follow.fold.without_log"
FOLLOWER = "indexer.follow.fold.StreamFollower"
QUESTION = "indexer.follow.follower.RecoveryQuestion"
FOLD = "tests.simulation.index.IndexFold"

PLANTED = (
    Planted(FOLLOWER, AppliesOverGaps, "faulty", 20),
    Planted(FOLLOWER, AppliesTwice, "faulty", 40),
    Planted(FOLLOWER, KeepsBlocksOverEpochs, "faulty", 80),
    Planted(FOLLOWER, NeverMissesTheLast, "faulty", 20),
    Planted(FOLLOWER, BelievesAnyDigest, "silent", 20),
    Planted(FOLLOWER, BelievesJumps, "silent", 20),
    Planted(FOLLOWER, WaitsForWhatCame, "faulty", 120, found_by=43),
    Planted(FOLLOWER, RequestsGapsAtOnce, "faulty", 20),
    Planted(FOLLOWER, RequestsAllForAGap, "faulty", 20),
    Planted(FOLLOWER, RequestsAllForADoubt, "silent", 20),
    Planted(FOLLOWER, RestoresOneAhead, "torn", 20),
    Planted(QUESTION, MixesAnswers, "faulty", 20),
    Planted(QUESTION, TakesLateAnswers, "restless", 40),
    Planted(QUESTION, NeverAsksAgain, "faulty", 20),
    Planted(QUESTION, KeepsQuestionsOverEpochs, "restless", 80),
    Planted(QUESTION, NeverForgivesPauses, "silent", 20),
    Planted(QUESTION, NeverPauses, "faulty", 20),
    Planted(WITHOUT_LOG, is_current_without_log, "torn", 20),
    Planted(FOLD, NeverMissesARank, "faulty", 80),
)
