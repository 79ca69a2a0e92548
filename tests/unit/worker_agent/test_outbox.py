"""A rank's stream on its way into the log: numbered without holes, in order, bounded."""

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from kv_protocol.codec import BLOCKS_PER_EVENT_MAX, MESSAGE_BYTES_MAX, decode_message, encode_batch, split_event
from kv_protocol.events import Batch, Cleared, Event, Stored, Tier
from worker_agent.events.outbox import ENTRY_BYTES, SMALL_MAX, Outbox, OutMessage

EPOCH = 77
BATCH_BYTES = len(encode_batch(Batch(EPOCH, 1, Cleared())))


def bounded(bytes_max: int) -> Outbox:
    outbox = Outbox(EPOCH)
    outbox.bytes_max = bytes_max
    return outbox


def add(outbox: Outbox, *events: Event) -> None:
    for event in events:
        outbox.add(event, source_seq=5, engine_time_ns=6)


def next_message(outbox: Outbox) -> OutMessage:
    message = outbox.next_message()
    assert message is not None
    return message


def drained(outbox: Outbox) -> list[OutMessage]:
    messages = []
    while message := outbox.next_message():
        messages.append(message)
        outbox.acknowledge(message)
    return messages


def given(outbox: Outbox) -> list[OutMessage]:
    """Return what is given out without any acknowledgement."""
    return list(iter(outbox.next_message, None))


def in_tail(outbox: Outbox, after_seq: int) -> list[int] | None:
    """Return the seqs that the tail has; None where there is no tail."""
    tail = outbox.tail(after_seq, 1 << 20)
    return None if tail is None else [batch.seq for message in tail for batch in decode_message(message)]


def fill(outbox: Outbox, batches: int) -> None:
    add(outbox, *(Cleared() for _ in range(batches)))


def batches(messages: list[OutMessage]) -> list[Batch]:
    return [batch for message in messages for batch in decode_message(message.payload)]


def chain(blocks: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + blocks))


# -------------------------------------------------------------------- large events
@pytest.mark.parametrize("blocks", [BLOCKS_PER_EVENT_MAX, BLOCKS_PER_EVENT_MAX + 1, 2 * BLOCKS_PER_EVENT_MAX + 7])
def test_a_large_store_goes_out_in_parts(blocks: int) -> None:
    outbox, whole = Outbox(EPOCH), Stored(chain(blocks), 9, 4, Tier.HOST)
    add(outbox, whole)
    messages = drained(outbox)
    assert [batch.event for batch in batches(messages)] == [*split_event(whole)]
    assert [batch.seq for batch in batches(messages)] == list(range(1, outbox.last_seq + 1))
    assert all(len(message.payload) <= MESSAGE_BYTES_MAX for message in messages)


# -------------------------------------------------------------------- messages in flight
def test_a_few_messages_are_in_flight_however_small_and_what_comes_then_travels_together() -> None:
    outbox = Outbox(EPOCH)
    for _ in range(SMALL_MAX):
        fill(outbox, 1)
        next_message(outbox)
    fill(outbox, 3)
    assert outbox.next_message() is None
    outbox.acknowledge(OutMessage(1, 1, b""))
    assert [batch.seq for batch in batches([next_message(outbox)])] == [SMALL_MAX + 1, SMALL_MAX + 2, SMALL_MAX + 3]


@pytest.mark.parametrize(("over", "batches_in_messages"), [(0, [2]), (1, [1, 1])])
def test_a_message_is_filled_up_to_its_bound_and_no_further(over: int, batches_in_messages: list[int]) -> None:
    outbox = Outbox(EPOCH)
    blocks = (MESSAGE_BYTES_MAX - 2 - 2 * BATCH_BYTES) // 8
    add(outbox, Stored(chain(blocks // 2)), Stored(chain(blocks - blocks // 2 + over)))
    messages = drained(outbox)
    assert [len(decode_message(message.payload)) for message in messages] == batches_in_messages
    assert over or MESSAGE_BYTES_MAX - 8 < len(messages[0].payload) <= MESSAGE_BYTES_MAX


def test_no_message_goes_over_a_place_that_was_told() -> None:
    outbox = Outbox(EPOCH)
    outbox.end_message_here()
    for more in (3, 0, 2, 4):
        fill(outbox, more)
        outbox.end_message_here()
    fill(outbox, 1)
    assert [message[:2] for message in drained(outbox)] == [(1, 3), (4, 5), (6, 9), (10, 10)]


def test_the_largest_batch_fills_a_message_alone() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Cleared(), Stored(chain(BLOCKS_PER_EVENT_MAX)), Cleared())
    assert [(message.first_seq, message.last_seq) for message in drained(outbox)] == [(1, 1), (2, 2), (3, 3)]


# -------------------------------------------------------------------- too much
def test_beyond_the_bound_the_oldest_give_way_and_are_counted() -> None:
    outbox = bounded(3 * BATCH_BYTES)
    add(outbox, *(Cleared() for _ in range(5)))
    assert (outbox.dropped_batches_total, outbox.last_seq, outbox.unacked_bytes) == (2, 5, 3 * BATCH_BYTES)
    assert [batch.seq for batch in batches(drained(outbox))] == [3, 4, 5]


def test_a_drop_leaves_a_gap_in_the_seqs_that_a_reader_finds() -> None:
    outbox = bounded(BATCH_BYTES)
    add(outbox, Cleared())
    messages = given(outbox)
    add(outbox, Cleared(), Cleared())
    assert [batch.seq for batch in batches(messages + drained(outbox))] == [1, 3]


def test_what_was_dropped_is_not_waited_for() -> None:
    outbox = bounded(BATCH_BYTES)
    fill(outbox, 3)
    assert outbox.settled_seq == 2


def test_an_event_larger_than_the_bound_is_dropped_and_the_stream_goes_on() -> None:
    outbox = bounded(BATCH_BYTES + 8)
    add(outbox, Stored((1, 2)))
    assert (outbox.next_message(), outbox.dropped_batches_total, outbox.last_seq) == (None, 1, 1)
    add(outbox, Stored((3,)))
    assert [batch.seq for batch in batches(drained(outbox))] == [2]


# -------------------------------------------------------------------- what is kept
def test_the_tail_has_every_batch_after_a_seq_acknowledged_in_flight_or_waiting() -> None:
    outbox = Outbox(EPOCH)
    fill(outbox, 3)
    outbox.acknowledge(next_message(outbox))
    fill(outbox, 2)
    next_message(outbox)
    fill(outbox, 1)
    assert [in_tail(outbox, after_seq) for after_seq in range(7)] == [[*range(first, 7)] for first in range(1, 8)]


def test_there_is_no_tail_behind_the_end() -> None:
    outbox = Outbox(EPOCH)
    assert (in_tail(outbox, 0), in_tail(outbox, 1)) == ([], None)


def test_the_oldest_of_what_was_published_give_way_and_there_is_no_tail_from_there() -> None:
    outbox = Outbox(EPOCH, ring_bytes_max=3 * (BATCH_BYTES + ENTRY_BYTES))
    fill(outbox, 5)
    drained(outbox)
    assert outbox.ring_bytes == 3 * (BATCH_BYTES + ENTRY_BYTES)
    assert (in_tail(outbox, 1), in_tail(outbox, 2), in_tail(outbox, 4)) == (None, [3, 4, 5], [5])


def test_without_a_ring_what_waits_has_a_tail_still() -> None:
    outbox = Outbox(EPOCH, ring_bytes_max=0)
    fill(outbox, 2)
    drained(outbox)
    fill(outbox, 1)
    assert (in_tail(outbox, 1), in_tail(outbox, 2), outbox.ring_bytes) == (None, [3], 0)


def test_no_tail_reaches_over_what_was_dropped() -> None:
    outbox = bounded(2 * BATCH_BYTES)
    fill(outbox, 2)
    message = next_message(outbox)
    fill(outbox, 3)
    assert (in_tail(outbox, 0), in_tail(outbox, 2), in_tail(outbox, 3)) == (None, None, [4, 5])
    outbox.acknowledge(message)
    drained(outbox)
    assert (in_tail(outbox, 2), in_tail(outbox, 3)) == (None, [4, 5])


def test_a_tail_that_is_too_long_is_none() -> None:
    outbox = Outbox(EPOCH)
    fill(outbox, 3)
    assert outbox.tail(1, 2 * BATCH_BYTES) is not None
    assert outbox.tail(0, 2 * BATCH_BYTES) is None


# -------------------------------------------------------------------- whatever happens to it
class Log:
    """Takes messages, or does not, and drops what it has by its first seq, as JetStream does by the message id."""

    def __init__(self) -> None:
        self.taken: dict[int, OutMessage] = {}

    def take(self, message: OutMessage) -> None:
        assert self.taken.setdefault(message.first_seq, message) == message

    @property
    def seqs(self) -> list[int]:
        return sorted(batch.seq for batch in batches(list(self.taken.values())))


@drawn(st.lists(st.sampled_from(["add", "give", "take", "lose the answer", "acknowledge", "go back"]), max_size=60))
def test_every_batch_is_in_the_log_once_whatever_was_lost_on_the_way(steps: list[str]) -> None:
    outbox, log, flying, answers = Outbox(EPOCH), Log(), [], []
    outbox.window = 3
    for step in [*steps, "go back"]:
        if step == "add":
            fill(outbox, 1)
        elif step == "give" and (message := outbox.next_message()) is not None:
            flying.append(message)
        elif step in ("take", "lose the answer") and flying:
            log.take(flying[0])
            answers += [flying.pop(0)][: step == "take"]
        elif step == "acknowledge" and answers:
            outbox.acknowledge(answers.pop())
        elif step == "go back":
            flying.clear()
            outbox.go_back()
        assert in_tail(outbox, 0) == list(range(1, outbox.last_seq + 1))
    for message in drained(outbox):
        log.take(message)
    assert log.seqs == list(range(1, outbox.last_seq + 1))
    assert (outbox.unacked_bytes, outbox.settled_seq) == (0, outbox.last_seq)
