"""Planted bugs of writers of a stream: the mirror, the outbox, the answers."""

from collections.abc import Iterator

import msgspec

from kv_protocol.digest import BUCKET_SET_BYTES, differing_buckets
from kv_protocol.events import Event, Tier
from kv_protocol.recovery import Answer, DumpChunk, HeldBlock, RecoverRequest
from tests.dumped import dump_chunks
from tests.simulation.planted import Planted
from tests.simulation.planted_followers import FOLLOWER, AppliesTwice
from worker_agent.events.block_names import EngineName
from worker_agent.events.consolidation import SOLE, Consolidation, Origin
from worker_agent.events.engine_events import EngineStored
from worker_agent.events.held_blocks import HeldBlocks
from worker_agent.events.mirror import RankMirror
from worker_agent.events.outbox import OUTBOX_BYTES_MAX, Outbox, OutMessage
from worker_agent.events.questions import PendingRecovery, QuestionOutcome, Questions


class DumpsOneSeqAhead(Consolidation):
    """Says that a dump covers a batch which it does not."""

    def dump(self, dp_rank: int, request_id: int) -> Iterator[DumpChunk]:
        for chunk in super().dump(dp_rank, request_id):
            yield msgspec.structs.replace(chunk, last_seq=chunk.last_seq + 1)


class DumpsAllButOne(Consolidation):
    """Leaves a block out."""

    def dump(self, dp_rank: int, request_id: int) -> Iterator[DumpChunk]:
        chunks = list(super().dump(dp_rank, request_id))
        blocks = [block for chunk in chunks for block in chunk.blocks()]
        yield from dump_chunks(request_id, chunks[0].epoch, chunks[0].last_seq, blocks[:-1])


class DumpsTheDead(Consolidation):
    """Keeps in a dump what was in an earlier one."""

    def dump(self, dp_rank: int, request_id: int) -> Iterator[DumpChunk]:
        chunks = list(super().dump(dp_rank, request_id))
        dumped = self.__dict__.setdefault("dumped", {})
        dumped.update({block.sequence_hash: block for chunk in chunks for block in chunk.blocks()})
        yield from dump_chunks(request_id, chunks[0].epoch, chunks[0].last_seq, dumped.values())


class DumpsForEveryQuestion(Consolidation):
    """Answers with all blocks, whatever would do."""

    def recover(self, dp_rank: int, request: RecoverRequest) -> Iterator[Answer]:
        return self.dump(dp_rank, request.request_id)


class AnswersTwice(Consolidation):
    """Sends each answer again behind its end."""

    def recover(self, dp_rank: int, request: RecoverRequest) -> Iterator[Answer]:
        yield from 2 * list(super().recover(dp_rank, request))


class AnswersTheLatestToCome(Questions):
    """Takes a question that was overtaken on its way for the newest one."""

    def ask(self, question: PendingRecovery) -> QuestionOutcome:
        present = self._waiting.get(question.asker) or self._answered
        if super().ask(question) != "overtaken":
            return "taken"
        self._waiting[question.asker] = question
        if self._answered is present:
            self._answered = None
        return "replaced"


class DumpsChildrenFirst(HeldBlocks):
    """Tells of a block before its parent."""

    def __iter__(self) -> Iterator[HeldBlock]:
        return reversed(list(super().__iter__()))


class ForgetsInSilence(Consolidation):
    """Forgets after a loss, and does not say so."""

    def on_loss(self, origin: Origin = SOLE, *, began_anew: bool = False) -> set[int]:
        outboxes = dict(self._outboxes)
        self._outboxes = {dp_rank: Outbox(0) for dp_rank in outboxes}
        changed = super().on_loss(origin, began_anew=began_anew)
        self._outboxes = outboxes
        return changed


class ForgetsNothing(Consolidation):
    """Believes after a loss what it believed before."""

    def on_loss(self, origin: Origin = SOLE, *, began_anew: bool = False) -> set[int]:  # noqa: ARG002
        return set()


class RemovesWithTheFirstAlias(RankMirror):
    """Takes one of several equal engine blocks for the last."""

    def _let_go(self, sequence_hash: int, tier: Tier) -> bool:
        self._blocks[sequence_hash].usable[tier] = 1
        return super()._let_go(sequence_hash, tier)


class RootsOrphans(RankMirror):
    """Takes a block of an unknown parent for the first of a sequence."""

    def _store(self, event: EngineStored, source: str) -> list[Event]:
        if event.parent_block_hash is not None and self._known(event.parent_block_hash, source) is None:
            event = msgspec.structs.replace(event, parent_block_hash=None)
        return super()._store(event, source)


class ClearsInSilence(RankMirror):
    """Leaves in its digest what a clear took away."""

    def _release(self, name: EngineName) -> list[Tier]:
        gone = super()._release(name)
        for tier in gone:
            self._digests[tier].add(name.sequence_hash)
        return gone


def repairs_all_but_one(table: bytes, other: bytes) -> bytes:
    """Take one bucket that differs for one that does not."""
    differing = int.from_bytes(differing_buckets(table, other), "little")
    return (differing & (differing - 1) if differing else 0).to_bytes(32, "little")


def repairs_all(table: bytes, other: bytes) -> bytes:
    """Take every bucket for one that differs."""
    del table, other
    return b"\xff" * BUCKET_SET_BYTES


class SkipsANumber(Outbox):
    """Leaves a hole in the seqs."""

    def add(self, event: Event, *, source_seq: int, engine_time_ns: int) -> None:
        self.last_seq += self.last_seq == 7
        super().add(event, source_seq=source_seq, engine_time_ns=engine_time_ns)


class LosesAnEvent(Outbox):
    """Gives an event no seq at all."""

    def add(self, event: Event, *, source_seq: int, engine_time_ns: int) -> None:
        if self.last_seq != 7 or self.__dict__.setdefault("lost", event) is not event:
            super().add(event, source_seq=source_seq, engine_time_ns=engine_time_ns)


class TailsBeginLate(Outbox):
    """Leaves the first batch out that is asked for."""

    def tail(self, after_seq: int, bytes_max: int = OUTBOX_BYTES_MAX) -> list[bytes] | None:
        return super().tail(min(after_seq + 1, self.last_seq), bytes_max)


class TailsBeginEarly(Outbox):
    """Gives one batch more than is asked for."""

    def tail(self, after_seq: int, bytes_max: int = OUTBOX_BYTES_MAX) -> list[bytes] | None:
        return super().tail(max(after_seq - 1, 0), bytes_max)


class GoesBackWithoutOne(Outbox):
    """Takes one of several unconfirmed messages for confirmed."""

    def go_back(self) -> None:
        if len(self._in_flight) > 1:
            del self._in_flight[min(self._in_flight)]
        super().go_back()


class ConfirmsAllBefore(Outbox):
    """Takes a confirmation for one of all that was published before."""

    def acknowledge(self, message: OutMessage) -> None:
        for first_seq in [each for each in self._in_flight if each < message.first_seq]:
            super().acknowledge(self._in_flight[first_seq])
        super().acknowledge(message)


CONSOLIDATION = "tests.simulation.agent.Consolidation"
QUESTIONS = "tests.simulation.answering.Questions"
MIRROR = "worker_agent.events.consolidation.RankMirror"
OUTBOX = "worker_agent.events.consolidation.Outbox"
DIFFERING = "worker_agent.events.recoveries.differing_buckets"
HELD = "worker_agent.events.mirror.HeldBlocks"

PLANTED = (
    Planted(CONSOLIDATION, DumpsOneSeqAhead, "faulty", 20),
    Planted(CONSOLIDATION, DumpsAllButOne, "faulty", 20),
    Planted(CONSOLIDATION, DumpsTheDead, "faulty", 20),
    Planted(CONSOLIDATION, DumpsForEveryQuestion, "faulty", 20),
    Planted(CONSOLIDATION, AnswersTwice, "faulty", 20),
    Planted(QUESTIONS, AnswersTheLatestToCome, "restless", 120, found_by=32),
    Planted(HELD, DumpsChildrenFirst, "faulty", 20),
    Planted(CONSOLIDATION, ForgetsInSilence, "faulty", 40),
    Planted(CONSOLIDATION, ForgetsNothing, "faulty", 40),
    Planted(MIRROR, RemovesWithTheFirstAlias, "faulty", 40),
    Planted(MIRROR, RootsOrphans, "faulty", 40),
    Planted(MIRROR, ClearsInSilence, "faulty", 40),
    Planted(DIFFERING, repairs_all_but_one, "faulty", 20),
    Planted(DIFFERING, repairs_all, "faulty", 20),
    Planted(OUTBOX, SkipsANumber, "calm", 20),
    Planted(OUTBOX, LosesAnEvent, "calm", 20),
    Planted(OUTBOX, TailsBeginLate, "faulty", 40),
    Planted(OUTBOX, TailsBeginEarly, "faulty", 80, (FOLLOWER, AppliesTwice)),
    Planted(OUTBOX, GoesBackWithoutOne, "torn", 40),
    Planted(OUTBOX, ConfirmsAllBefore, "torn", 80),
)
