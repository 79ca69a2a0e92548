"""Messages: what their heads tell is what decoding tells, and whole or decoded they make the same fold."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.follow.fold import IndexFold
from indexer.follow.follower import FollowerLimits
from indexer.follow.inputs import BatchSpan, Fact, Question, Received, message_span, read_message
from indexer.native.index import NativeIndex
from kv_protocol import codec
from kv_protocol.digest import SetDigest, bucket_table
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import RecoverRequest
from kv_protocol.splitmix import splitmix64
from tests.reference.index.index import ReferenceIndex
from tests.support.amount import examples
from tests.unit.indexer.life import Life, arrived, told, unreadable

A0, B0 = WorkerRank("a", 0), WorkerRank("b", 0)
LIMITS = FollowerLimits(gap_s=0.0, behind_s=2.0, answer_s=2.0, early_batches_max=16)
PATH = tuple(splitmix64(at) for at in range(8))
SEEDS = range(examples(20, least=8))


def path(seq: int, first: int, last: int, epoch: int = 7) -> Batch:
    return Batch(epoch, seq, Stored(PATH[first:last], PATH[first - 1] if first else None, first))


def decoded(*batches: Batch, rank: WorkerRank = A0) -> Received:
    """Return the message as one that the fold has to decode."""
    message = read_message(codec.encode_message(batches))
    return Received(rank, msgspec.structs.replace(message, span=None))


class Recording(ReferenceIndex):
    """Knows how many messages it was given whole."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0

    def apply_batch(self, rank: int, message: bytes, now_s: float) -> int:
        self.messages += 1
        return super().apply_batch(rank, message, now_s)


def asks_repair(fold: IndexFold, request_id: int, after_seq: int) -> Question:
    digest = SetDigest(block.sequence_hash for block in fold.held(A0))
    table = bucket_table([digest.buckets, *[SetDigest().buckets] * 3])
    return Question(A0, RecoverRequest(request_id, 7, after_seq, table))


def depth(fold: IndexFold, rank: WorkerRank = A0) -> int:
    return fold.overlap(PATH, [rank])[0].overlap_blocks[0]


# ------------------------------------------------------------------------------------------------- which way


def test_a_message_that_continues_its_stream_goes_to_the_index_as_it_is() -> None:
    fold = IndexFold(index := Recording())
    told(fold, arrived(A0, path(1, 0, 1)))
    assert (index.messages, depth(fold)) == (0, 1), "the first of a rank proves nothing yet"
    told(fold, arrived(A0, path(2, 1, 3)), arrived(A0, path(3, 3, 5), path(4, 5, 8)))
    assert (index.messages, depth(fold)) == (2, 8)
    now = fold.statistics().streams[A0]
    assert (now.cursor, now.counts.applied, now.stale) == (4, 4, "")


@pytest.mark.parametrize(
    "batches",
    [
        [path(2, 1, 2)],
        [path(2, 1, 2), path(3, 2, 4)],
        [path(5, 4, 5)],
        [path(3, 2, 3), path(5, 4, 5)],
        [path(3, 2, 3, epoch=8)],
        [path(3, 2, 3), path(4, 3, 4, epoch=8)],
    ],
    ids=["known", "partly known", "a gap", "a gap within", "another epoch", "another epoch within"],
)
def test_any_other_message_goes_batch_by_batch(batches: list[Batch]) -> None:
    whole, single = IndexFold(index := Recording()), IndexFold(Recording())
    for fold in (whole, single):
        told(fold, *(decoded(path(seq, seq - 1, seq)) for seq in (1, 2)))
    questions = told(whole, arrived(A0, *batches))
    assert index.messages == 0
    assert questions == told(single, *map(decoded, batches))
    assert whole.statistics() == single.statistics()


# ------------------------------------------------------------------------------------------------- refusals


class Short(ReferenceIndex):
    """Has no memory for a block of any message."""

    def apply_batch(self, rank: int, message: bytes, now_s: float) -> int:
        return super().apply_batch(rank, message, now_s) + 1


def test_want_of_memory_is_no_fault_of_a_message() -> None:
    fold = IndexFold(Short())
    told(fold, arrived(A0, path(1, 0, 1)))
    assert (told(fold, arrived(A0, path(2, 1, 2))), fold.overfull_ranks()) == ([], {A0})
    assert fold.statistics().refused_messages_total == 0


# ------------------------------------------------------------------------------------------------- the same fold


class TwoWays:
    """The same facts told to two folds, to one of them in whole messages; after each they must be alike."""

    def __init__(self, whole: IndexFold, single: IndexFold) -> None:
        self.whole, self.single = whole, single
        self.questions: list[Question] = []

    def tell(self, fact: Fact, now_s: float) -> None:
        self.compare(self.whole.apply(fact, now_s), self.single.apply(fact, now_s))

    def message(self, rank: WorkerRank, data: bytes, now_s: float) -> None:
        try:
            message = read_message(data)
        except MalformedMessage:
            self.tell(unreadable(rank), now_s)
            return
        one = self.whole.apply(Received(rank, message), now_s)
        other = self.single.apply(Received(rank, msgspec.structs.replace(message, span=None)), now_s)
        self.compare(one, other)

    def tick(self, now_s: float) -> None:
        self.compare(self.whole.tick(now_s), self.single.tick(now_s))
        for rank in self.whole.ranks():
            assert set(self.whole.held(rank)) == set(self.single.held(rank))

    def compare(self, one: list[Question], other: list[Question]) -> None:
        assert one == other
        assert self.whole.statistics() == self.single.statistics()
        for rank in self.whole.ranks():
            assert self.whole.overlap((), [rank]) == self.single.overlap((), [rank])
        self.questions += one


def play(seed: int, ways: TwoWays) -> None:
    random = Random(seed)
    lives = {rank: Life(rank, random) for rank in (A0, B0)}
    sent: list[tuple[WorkerRank, bytes]] = []
    for step in range(120):
        now_s = step / 4
        for life in lives.values():
            if random.random() < 0.06:
                life.begin(life.epoch + 1)
            data = codec.encode_message([life.batch() for _ in range(random.randint(1, 3))])
            sent.append((life.rank, data))
            if step % 8 == 0:  # a pulse that overtakes what it tells of
                ways.tell(life.beat(), now_s)
            for rank, each in deliveries(random, sent):
                ways.message(rank, each, now_s)
            if step % 8 == 4:
                ways.tell(life.beat(), now_s)
        for question in [question for question in ways.questions if random.random() < 0.7]:
            for chunk in lives[question.rank].answer(question):
                ways.tell(chunk, now_s)
        ways.questions.clear()
        ways.tick(now_s)


def deliveries(random: Random, sent: list[tuple[WorkerRank, bytes]]) -> list[tuple[WorkerRank, bytes]]:
    """Return what comes of the newest message: itself as a rule; nothing, a part, or also a former one."""
    rank, data = sent[-1]
    fault = random.random()
    if fault < 0.06:
        return []
    if fault < 0.09:
        return [(rank, data[: random.randrange(len(data))])]
    if fault < 0.15:
        return [random.choice(sent[-12:]), (rank, data)]
    return [(rank, data)]


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_messages_and_single_batches_make_the_same_fold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_batch, messages = NativeIndex.apply_batch, list[bytes]()

    def recorded(index: NativeIndex, rank: int, message: bytes, now_s: float) -> int:
        messages.append(message)
        return apply_batch(index, rank, message, now_s)

    monkeypatch.setattr(NativeIndex, "apply_batch", recorded)
    play(seed, TwoWays(IndexFold(NativeIndex(), LIMITS), IndexFold(NativeIndex(), LIMITS)))
    assert len(messages) > 20, f"seed {seed}: few messages went the short way"


STORED, CHILD, REMOVED, CLEARED = Stored((1, 2)), Stored((3, 4), 2, 2, Tier.HOST), Removed((3,), Tier.HOST), Cleared()


def message(*batches: Batch) -> bytes:
    return codec.encode_message(batches)


def row(first_seq: int, *events: Event, epoch: int = 7) -> list[Batch]:
    return [Batch(epoch, first_seq + at, event, 5, 100 + at) for at, event in enumerate(events)]


def decoded_span(data: bytes) -> BatchSpan | None:
    """Return what decoding tells of the message."""
    batches = codec.decode_message(data)
    first, last = batches[0], batches[-1]
    is_row = [(batch.epoch, batch.seq) for batch in batches] == [
        (first.epoch, first.seq + at) for at in range(len(batches))
    ]
    return BatchSpan(first.epoch, first.seq, last.seq, last.engine_time_ns) if is_row else None


def test_the_span_of_several_is_from_the_first_to_the_last() -> None:
    data = message(*row(4, STORED, CHILD, REMOVED, CLEARED))
    assert message_span(data) == BatchSpan(7, 4, 7, 103)
    read = read_message(data)
    assert (read.data, read.span, read.engine_time_ns) == (data, BatchSpan(7, 4, 7, 103), 103)


@pytest.mark.parametrize(
    "batches",
    [
        [*row(4, STORED), *row(6, STORED)],
        [*row(4, STORED), *row(4, STORED)],
        [*row(5, STORED), *row(4, STORED)],
        [*row(4, STORED), *row(5, STORED, epoch=8)],
    ],
    ids=["a hole", "twice", "backwards", "two epochs"],
)
def test_batches_that_do_not_follow_each_other_have_no_span_and_are_a_message(batches: list[Batch]) -> None:
    read = read_message(message(*batches))
    assert (read.span, read.engine_time_ns) == (None, batches[-1].engine_time_ns)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0", b"\1\0", message(*row(1, STORED))[:-1], bytes(60)], ids=len)
def test_what_cannot_be_cut_has_no_span_and_is_no_message(data: bytes) -> None:
    assert message_span(data) is None
    with pytest.raises(MalformedMessage):
        read_message(data)


u64s = st.integers(0, 2**64 - 1)
hashes = st.lists(u64s, min_size=1, max_size=5).map(tuple)
tiers = st.sampled_from(TIERS)
events = st.one_of(
    st.builds(Stored, hashes, st.none(), st.just(0), tiers),
    st.builds(Stored, hashes, u64s, st.integers(1, 2**32 - 5), tiers),
    st.builds(Removed, hashes, tiers),
    st.builds(Cleared, tiers),
)
rows = st.builds(
    lambda first, epoch, each: row(first, *each, epoch=epoch),
    st.integers(1, 9) | st.just(2**64 - 9), u64s, st.lists(events, min_size=1, max_size=4),
)  # fmt: skip
mixtures = st.lists(rows, min_size=1, max_size=2).map(lambda each: [batch for row_ in each for batch in row_])


@settings(max_examples=examples(400))
@given(mixtures)
def test_of_any_message_the_heads_tell_what_decoding_tells(batches: list[Batch]) -> None:
    data = message(*batches)
    assert message_span(data) == decoded_span(data)


@settings(max_examples=examples(1500))
@given(mixtures, st.integers(0, 400), st.integers(0, 255), st.sampled_from(["change", "cut", "add"]))
def test_of_any_spoilt_message_the_heads_tell_no_more_than_decoding(
    batches: list[Batch], at: int, byte: int, how: str
) -> None:
    data = message(*batches)
    at %= len(data)
    match how:
        case "change":
            data = data[:at] + bytes([byte]) + data[at + 1 :]
        case "cut":
            data = data[:at]
        case _:
            data += bytes([byte])
    try:
        expected = decoded_span(data)
    except MalformedMessage:
        expected = None
    assert message_span(data) == expected
