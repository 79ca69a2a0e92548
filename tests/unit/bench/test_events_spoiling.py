"""What befalls messages between the log and an index that the event bench damages."""

from bench.events.spoiling import Damaging, Losing, unspoiled
from kv_protocol import codec, subjects
from kv_protocol.events import Batch, Stored
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import LogMessage

RANK, OTHER = WorkerRank("w0", 0), WorkerRank("w1", 0)


def message(rank: WorkerRank, *seqs: int) -> LogMessage:
    batches = [Batch(7, seq, Stored((seq << 32, seq << 32 | 1))) for seq in seqs]
    return LogMessage(subjects.events("m", rank), codec.encode_message(batches))


def test_what_is_said_of_a_lost_rank_does_not_come_and_is_counted() -> None:
    losing = Losing(RANK)
    assert losing(message(RANK, 3, 4)) is None
    assert losing(LogMessage(subjects.heartbeat("m", RANK), b"{}")) is None
    assert losing.lost_seq == 4


def test_what_is_said_of_others_comes_as_it_is() -> None:
    for told in (message(OTHER, 1), LogMessage("_INBOX.a.w0.0", b"answer")):
        assert Losing(RANK)(told) == Damaging(RANK)(told) == unspoiled(told) == told


def test_one_hash_of_one_message_is_another_and_stays_in_its_bucket() -> None:
    damaging = Damaging(RANK)
    pulse, first, second = LogMessage(subjects.heartbeat("m", RANK), b"{}"), message(RANK, 1, 2), message(RANK, 3)
    assert damaging(pulse) == pulse
    damaged = damaging(first)
    assert damaged is not None
    before, after = codec.decode_message(first.data), codec.decode_message(damaged.data)
    assert after == [before[0], Batch(7, 2, Stored((2 << 32, 2 << 32)))]
    assert damaging(second) == second
