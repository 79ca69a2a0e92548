"""A rank's stream on its way into the log: numbered without holes, in order, bounded."""

from itertools import pairwise

import pytest

from kv_protocol.codec import (
    BATCHES_PER_MESSAGE_MAX,
    BLOCKS_PER_EVENT_MAX,
    MESSAGE_BYTES_MAX,
    decode_message,
    encode_batch,
)
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from worker_agent.core.outbox import Outbox, OutMessage

EPOCH = 77
BATCH_BYTES = len(encode_batch(Batch(EPOCH, 1, Cleared())))


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
        outbox.acknowledge()
    return messages


def batches(messages: list[OutMessage]) -> list[Batch]:
    return [batch for message in messages for batch in decode_message(message.payload)]


def chain(blocks: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + blocks))


# -------------------------------------------------------------------- numbers
def test_events_are_numbered_from_1_without_holes_across_messages() -> None:
    outbox = Outbox(EPOCH)
    events: list[Event] = [Stored((1,)), Removed((1,), Tier.HOST), Cleared()]
    add(outbox, *events[:2])
    first = drained(outbox)
    add(outbox, *events[2:])
    assert batches(first + drained(outbox)) == [
        Batch(EPOCH, seq, event, 5, 6) for seq, event in enumerate(events, start=1)
    ]
    assert outbox.last_seq == 3


def test_a_message_names_its_first_and_last_seq() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Cleared())
    drained(outbox)
    add(outbox, Cleared(), Cleared(), Cleared())
    message = next_message(outbox)
    assert (message.first_seq, message.last_seq) == (2, 4)
    assert [batch.seq for batch in decode_message(message.payload)] == [2, 3, 4]


def test_an_empty_outbox_has_nothing_to_publish() -> None:
    outbox = Outbox(EPOCH)
    assert outbox.next_message() is None
    outbox.acknowledge()
    assert (outbox.next_message(), outbox.last_seq, outbox.waiting_bytes) == (None, 0, 0)


# -------------------------------------------------------------------- large events
@pytest.mark.parametrize("blocks", [BLOCKS_PER_EVENT_MAX, BLOCKS_PER_EVENT_MAX + 1, 2 * BLOCKS_PER_EVENT_MAX + 7])
def test_a_large_store_goes_out_in_parts_each_under_the_last_block_of_the_one_before(blocks: int) -> None:
    outbox, whole = Outbox(EPOCH), Stored(chain(blocks), 9, 4, Tier.HOST)
    add(outbox, whole)
    messages = drained(outbox)
    parts = [batch.event for batch in batches(messages)]
    assert [batch.seq for batch in batches(messages)] == list(range(1, outbox.last_seq + 1))
    assert all(len(message.payload) <= MESSAGE_BYTES_MAX for message in messages)
    stores = [part for part in parts if isinstance(part, Stored)]
    assert tuple(block for store in stores for block in store.sequence_hashes) == whole.sequence_hashes
    assert (stores[0].parent, stores[0].start) == (whole.parent, whole.start)
    for before, after in pairwise(stores):
        assert after.parent == before.sequence_hashes[-1]
        assert after.start == before.start + len(before.sequence_hashes)
        assert after.tier is whole.tier


def test_a_large_removal_goes_out_in_parts() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Removed(chain(BLOCKS_PER_EVENT_MAX + 1), Tier.DISK))
    assert [batch.event for batch in batches(drained(outbox))] == [
        Removed(chain(BLOCKS_PER_EVENT_MAX), Tier.DISK),
        Removed((BLOCKS_PER_EVENT_MAX + 1,), Tier.DISK),
    ]


# -------------------------------------------------------------------- one message in flight
def test_until_it_is_acknowledged_the_same_message_is_given_byte_for_byte() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Stored((1,)))
    message = next_message(outbox)
    add(outbox, Stored((2,)), Cleared())
    assert next_message(outbox) == message
    assert [batch.seq for batch in decode_message(message.payload)] == [1]


def test_what_comes_meanwhile_travels_together_in_the_next() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Stored((1,)))
    outbox.next_message()
    add(outbox, Stored((2,)), Cleared())
    outbox.acknowledge()
    assert [batch.seq for batch in decode_message(next_message(outbox).payload)] == [2, 3]


@pytest.mark.parametrize(("over", "batches_in_messages"), [(0, [2]), (1, [1, 1])])
def test_a_message_is_filled_up_to_its_bound_and_no_further(over: int, batches_in_messages: list[int]) -> None:
    outbox = Outbox(EPOCH)
    blocks = (MESSAGE_BYTES_MAX - 2 - 2 * BATCH_BYTES) // 8
    add(outbox, Stored(chain(blocks // 2)), Stored(chain(blocks - blocks // 2 + over)))
    messages = drained(outbox)
    assert [len(decode_message(message.payload)) for message in messages] == batches_in_messages
    assert over or MESSAGE_BYTES_MAX - 8 < len(messages[0].payload) <= MESSAGE_BYTES_MAX


def test_the_largest_batch_fills_a_message_alone() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Cleared(), Stored(chain(BLOCKS_PER_EVENT_MAX)), Cleared())
    assert [(message.first_seq, message.last_seq) for message in drained(outbox)] == [(1, 1), (2, 2), (3, 3)]


def test_a_message_counts_no_more_batches_than_its_count_can_say() -> None:
    assert BATCHES_PER_MESSAGE_MAX * BATCH_BYTES > MESSAGE_BYTES_MAX
    outbox = Outbox(EPOCH)
    add(outbox, *(Cleared() for _ in range(MESSAGE_BYTES_MAX // BATCH_BYTES + 1)))
    messages = drained(outbox)
    assert [batch.seq for batch in batches(messages)] == list(range(1, outbox.last_seq + 1))
    assert all(len(message.payload) <= MESSAGE_BYTES_MAX for message in messages)


# -------------------------------------------------------------------- too much
def test_beyond_the_bound_the_oldest_give_way_and_are_counted() -> None:
    outbox = Outbox(EPOCH, bytes_max=3 * BATCH_BYTES)
    add(outbox, *(Cleared() for _ in range(5)))
    assert (outbox.dropped_batches_total, outbox.last_seq, outbox.waiting_bytes) == (2, 5, 3 * BATCH_BYTES)
    assert [batch.seq for batch in batches(drained(outbox))] == [3, 4, 5]


def test_a_drop_leaves_a_gap_in_the_seqs_that_a_reader_finds() -> None:
    outbox = Outbox(EPOCH, bytes_max=BATCH_BYTES)
    add(outbox, Cleared())
    outbox.next_message()
    add(outbox, Cleared(), Cleared())
    assert [batch.seq for batch in batches(drained(outbox))] == [1, 3]


def test_the_message_in_flight_is_never_dropped_nor_changed() -> None:
    outbox = Outbox(EPOCH, bytes_max=2 * BATCH_BYTES)
    add(outbox, Cleared(), Cleared())
    message = next_message(outbox)
    add(outbox, *(Cleared() for _ in range(5)))
    assert next_message(outbox) == message
    assert outbox.dropped_batches_total == 3


def test_an_event_larger_than_the_bound_is_dropped_and_the_stream_goes_on() -> None:
    outbox = Outbox(EPOCH, bytes_max=BATCH_BYTES + 8)
    add(outbox, Stored((1, 2)))
    assert (outbox.next_message(), outbox.dropped_batches_total, outbox.last_seq) == (None, 1, 1)
    add(outbox, Stored((3,)))
    assert [batch.seq for batch in batches(drained(outbox))] == [2]


def test_waiting_bytes_are_those_not_acknowledged_yet() -> None:
    outbox = Outbox(EPOCH)
    add(outbox, Cleared(), Cleared())
    assert outbox.waiting_bytes == 2 * BATCH_BYTES
    message = next_message(outbox)
    assert outbox.waiting_bytes == len(message.payload) == 2 + 2 * BATCH_BYTES
    add(outbox, Cleared())
    assert outbox.waiting_bytes == 2 + 3 * BATCH_BYTES
    outbox.acknowledge()
    assert outbox.waiting_bytes == BATCH_BYTES
    drained(outbox)
    assert outbox.waiting_bytes == 0
