"""Questions about a rank, and the answers to readers that lost their place in its stream, or their faith in theirs."""

from collections.abc import Iterable
from itertools import count

import pytest

from bench.capture.payloads import encode_payload
from kv_protocol.codec import decode_message
from kv_protocol.digest import SetDigest, bucket_table, is_in_buckets
from kv_protocol.events import Batch, Tier
from kv_protocol.hashing import sequence_hashes
from kv_protocol.recovery import Answer, DumpChunk, HeldBlock, RecoverRequest, ReplayChunk
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.events.recoveries import QUESTIONS_MAX, PendingRecovery, Questions, kind_of

FIRST, SECOND = RecoverRequest(1), RecoverRequest(2)


def ask(questions: Questions, asker: str, request: RecoverRequest = FIRST) -> str:
    return questions.ask(PendingRecovery(asker, request))


def test_askers_are_answered_in_the_order_in_which_they_came() -> None:
    questions = Questions()
    assert [ask(questions, asker) for asker in "abc"] == ["taken"] * 3
    assert [questions.next() for _ in range(4)] == [*(PendingRecovery(asker, FIRST) for asker in "abc"), None]


def test_a_question_repeated_while_it_waits_or_is_answered_is_dropped() -> None:
    questions = Questions()
    ask(questions, "a")
    assert ask(questions, "a") == "dropped"
    answered = questions.next()
    assert answered is not None
    assert ask(questions, "a") == "dropped"
    assert questions.is_current(answered)
    assert questions.next() is None


def test_another_question_of_the_asker_being_answered_ends_that_answer() -> None:
    questions = Questions()
    ask(questions, "a")
    answered = questions.next()
    assert answered is not None
    assert ask(questions, "a", SECOND) == "replaced"
    assert not questions.is_current(answered)
    assert ask(questions, "a", SECOND) == "dropped"
    assert questions.next() == PendingRecovery("a", SECOND)


def test_an_earlier_question_that_comes_late_does_not_replace_the_one_that_waits() -> None:
    questions = Questions()
    ask(questions, "a", SECOND)
    assert ask(questions, "a", FIRST) == "dropped"
    assert [questions.next(), questions.next()] == [PendingRecovery("a", SECOND), None]


def test_beyond_a_bound_askers_are_turned_away_but_waiting_ones_may_ask_again() -> None:
    questions = Questions()
    for asker in range(QUESTIONS_MAX):
        ask(questions, str(asker))
    assert ask(questions, "late") == "turned_away"
    assert ask(questions, "0", SECOND) == "replaced"
    questions.next()
    assert ask(questions, "late") == "taken"


BLOCK_SIZE, EPOCH = 2, 1000
TOKENS = tuple(range(100))
CHAIN = tuple(sequence_hashes(TOKENS, BLOCK_SIZE))
EMPTY_TABLE = bucket_table([SetDigest().buckets] * 4)


def consolidation(*, ring_bytes_max: int = 1 << 20, chunk_blocks: int = 8192) -> Consolidation:
    """One rank; its epoch is 1000."""
    core = Consolidation((0,), BLOCK_SIZE, "i", count(EPOCH).__next__, ring_bytes_max=ring_bytes_max)
    core.chunk_blocks = chunk_blocks
    return core


def store(first: int, blocks: int, tier: Tier = Tier.GPU) -> EngineStored:
    return EngineStored(
        block_hashes=tuple(range(first + 1, first + 1 + blocks)),
        parent_block_hash=first or None,
        token_ids=TOKENS[first * BLOCK_SIZE : (first + blocks) * BLOCK_SIZE],
        block_size=BLOCK_SIZE,
        tier=tier,
    )


def tell(core: Consolidation, *events: EngineEvent) -> None:
    core.on_payload(0, encode_payload(0.0, events, 0))


def publish(core: Consolidation) -> list[Batch]:
    """The log takes all there is; return it."""
    batches: list[Batch] = []
    while message := core.outboxes[0].next_message():
        core.outboxes[0].acknowledge(message)
        batches += decode_message(message.payload)
    return batches


def table(*hashes: int, host: Iterable[int] = ()) -> bytes:
    empty = SetDigest().buckets
    return bucket_table([SetDigest(hashes).buckets, SetDigest(host).buckets, empty, empty])


def answer(core: Consolidation, epoch: int = EPOCH, after_seq: int = 0, buckets: bytes = b"") -> list[Answer]:
    return list(core.recover(0, RecoverRequest(7, epoch, after_seq, buckets)))


def replayed(parts: list[Answer]) -> list[Batch]:
    batches: list[Batch] = []
    for part in parts:
        assert isinstance(part, ReplayChunk)
        batches += decode_message(part.message) if part.message else []
    return batches


def rows(parts: list[Answer]) -> list[HeldBlock]:
    blocks: list[HeldBlock] = []
    for part in parts:
        assert isinstance(part, DumpChunk)
        blocks += part.columns.blocks()
    return blocks


# -------------------------------------------------------------------- replay


def test_no_seq_is_missing_or_told_twice_whatever_was_asked_for() -> None:
    core = consolidation()
    tell(core, store(0, 40))
    for at in range(40, 50):
        tell(core, store(at, 1))
        publish(core)
    assert [[batch.seq for batch in replayed(answer(core, after_seq=after_seq))] for after_seq in range(4, 12)] == [
        list(range(after_seq + 1, 12)) for after_seq in range(4, 12)
    ]


# -------------------------------------------------------------------- dump
@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
def test_a_reader_of_another_epoch_or_none_gets_a_dump(epoch: int) -> None:
    core = consolidation()
    tell(core, store(0, 3), EngineRemoved(block_hashes=(3,)))
    parts = answer(core, epoch, buckets=EMPTY_TABLE)
    assert rows(parts) == [HeldBlock(CHAIN[0], None, 1), HeldBlock(CHAIN[1], CHAIN[0], 1)]
    assert [(part.epoch, part.last_seq, kind_of(part)) for part in parts] == [(EPOCH, 2, "dump")]


def test_a_reader_that_missed_dropped_batches_gets_a_dump() -> None:
    core = consolidation(ring_bytes_max=0)
    tell(core, store(0, 40), store(40, 1))
    publish(core)
    assert len(rows(answer(core, after_seq=1))) == 41


def test_a_place_that_was_never_reached_is_answered_with_everything() -> None:
    core = consolidation()
    tell(core, store(0, 3))
    assert kind_of(answer(core, after_seq=2)[0]) == "dump"


def test_what_changed_more_than_it_holds_is_told_whole() -> None:
    core = consolidation()
    for _ in range(20):
        tell(core, store(0, 40), EngineCleared())
    assert [kind_of(part) for part in answer(core, after_seq=0)] == ["dump"]
    assert [kind_of(part) for part in answer(core, after_seq=39)] == ["replay"]


# -------------------------------------------------------------------- repair
def test_a_reader_that_differs_gets_the_blocks_of_the_different_buckets() -> None:
    core = consolidation()
    tell(core, store(0, 40))
    ghost = CHAIN[0] ^ 1
    (part,) = answer(core, after_seq=1, buckets=table(*CHAIN[:19], *CHAIN[20:40], ghost))
    assert isinstance(part, DumpChunk)
    wanted = {CHAIN[0] >> 56, CHAIN[19] >> 56}
    assert {bucket for bucket in range(256) if is_in_buckets(bucket << 56, part.buckets)} == wanted
    assert [row.sequence_hash for row in part.columns.blocks()] == [each for each in CHAIN[:40] if each >> 56 in wanted]
    assert (part.epoch, part.last_seq, kind_of(part)) == (EPOCH, 1, "repair")


def test_a_block_on_another_tier_makes_its_bucket_differ() -> None:
    core = consolidation()
    tell(core, store(0, 40), store(0, 1, Tier.HOST))
    parts = answer(core, after_seq=2, buckets=table(*CHAIN[:40]))
    assert HeldBlock(CHAIN[0], None, 0b11) in rows(parts)
    assert all(row.sequence_hash >> 56 == CHAIN[0] >> 56 for row in rows(parts))


@pytest.mark.parametrize("after_seq", [0, 1, 2, 99])
def test_a_repair_is_of_now_whatever_place_the_asker_is_at(after_seq: int) -> None:
    core = consolidation()
    tell(core, store(0, 10), EngineRemoved(block_hashes=(10,)))
    parts = answer(core, after_seq=after_seq, buckets=EMPTY_TABLE)
    assert [row.sequence_hash for row in rows(parts)] == list(CHAIN[:9])
    assert {part.last_seq for part in parts} == {2}
