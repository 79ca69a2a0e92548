"""All ranks of one worker between hop A and hop B: streams, proof, recovery, and what cannot be read."""

from itertools import count

import pytest

from bench.capture.payloads import encode_payload
from kv_protocol.codec import decode_message
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.events import Batch, Cleared, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.hashing import sequence_hashes
from kv_protocol.recovery import DumpChunk, HeldBlock, RecoverRequest
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

BLOCK_SIZE = 2
TOKENS = (1, 2, 3, 4, 5, 6)
CHAIN = tuple(sequence_hashes(TOKENS, BLOCK_SIZE))
STORED = EngineStored(block_hashes=(11, 12, 13), parent_block_hash=None, token_ids=TOKENS, block_size=BLOCK_SIZE)
STORED_EVENT = Stored(CHAIN)
REMOVED = EngineRemoved(block_hashes=(13,))
UNREADABLE = b"\x81\xa4type\xa7Unknown"


@pytest.fixture
def core() -> Consolidation:
    """Two ranks; epochs are 1000, 1001, ..."""
    return Consolidation((0, 1), BLOCK_SIZE, "instance", count(1000).__next__)


def payload(*events: EngineEvent, dp_rank: int = 0, time_s: float = 1.5) -> bytes:
    return encode_payload(time_s, events, dp_rank)


def with_unreadable(*events: EngineEvent, before: bool = False) -> bytes:
    """Return a payload of rank 0 with one event that cannot be read behind the others, or before them."""
    whole = payload(*events)
    head, body = whole[:10], whole[11:-1]
    events_array = bytes([0x90 + len(events) + 1])
    return head + events_array + (UNREADABLE + body if before else body + UNREADABLE) + whole[-1:]


def told(core: Consolidation, dp_rank: int = 0) -> list[Batch]:
    """Return what the rank's outbox publishes now."""
    batches: list[Batch] = []
    while message := core.outboxes[dp_rank].next_message():
        batches += decode_message(message.payload)
        core.outboxes[dp_rank].acknowledge(message)
    return batches


def dumped(core: Consolidation, dp_rank: int = 0) -> list[HeldBlock]:
    return list(core.mirrors[dp_rank].dump())


# -------------------------------------------------------------------- streams
def test_an_event_becomes_a_batch_with_its_hop_a_sequence_and_time(core: Consolidation) -> None:
    assert core.on_payload(7, payload(STORED, time_s=1.25)) == {0}
    assert told(core) == [Batch(1000, 1, STORED_EVENT, 7, 1_250_000_000)]


def test_a_payload_that_changes_nothing_has_nothing_to_publish(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED))
    assert core.on_payload(1, payload(STORED)) == set()
    assert core.outboxes[0].last_seq == 1


# -------------------------------------------------------------------- proof and dump
def test_a_heartbeat_is_the_place_in_the_stream_and_the_proof_of_the_set_there(core: Consolidation) -> None:
    assert core.heartbeat(0) == Heartbeat(instance="instance", epoch=1000, last_seq=0)
    core.on_payload(0, payload(STORED, REMOVED))
    digest = TierDigest(Tier.GPU, 2, SetDigest(CHAIN[:2]).total)
    assert core.heartbeat(0) == Heartbeat(instance="instance", epoch=1000, last_seq=2, tiers=(digest,))


def test_a_reader_comes_to_just_the_place_of_a_heartbeat(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED))
    place = core.heartbeat(0).last_seq
    core.on_payload(1, payload(REMOVED))
    messages = list(iter(core.outboxes[0].next_message, None))
    assert [message.last_seq for message in messages] == [place, place + 1]


def test_a_heartbeat_speaks_of_what_is_numbered_published_or_not(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED))
    before = core.heartbeat(0)
    told(core)
    assert core.heartbeat(0) == before


def test_the_dump_of_an_empty_rank_is_one_empty_chunk(core: Consolidation) -> None:
    (chunk,) = core.recover(1, RecoverRequest(5))
    assert isinstance(chunk, DumpChunk)
    assert (chunk.epoch, chunk.last_seq, chunk.of, list(chunk.columns.blocks())) == (1001, 0, 1, [])


# -------------------------------------------------------------------- what cannot be read
@pytest.mark.parametrize("before", [True, False])
def test_an_unreadable_event_costs_its_batch_nothing_and_makes_its_rank_stale(
    core: Consolidation, before: bool
) -> None:
    assert core.on_payload(0, with_unreadable(STORED, before=before)) == {0}
    assert [batch.event for batch in told(core)] == [STORED_EVENT]
    assert core.heartbeat(0).stale.startswith("engine: unreadable event: ")
    assert core.heartbeat(1).stale == ""
    assert core.publishers[SOLE].decoder.counts["refused"] == 1


def test_an_unreadable_batch_makes_every_rank_stale_for_it_may_be_any_rank_s(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED))
    assert core.on_payload(1, b"\xc1") == set()
    assert [core.heartbeat(dp_rank).stale[:24] for dp_rank in core.dp_ranks] == ["engine: unreadable batch"] * 2
    assert core.publishers[SOLE].refused_batches_total == 1
    assert len(dumped(core)) == 3


def test_a_rank_known_to_be_empty_is_stale_no_more(core: Consolidation) -> None:
    core.on_payload(0, b"\xc1")
    core.on_payload(1, payload(EngineCleared(), dp_rank=1))
    assert core.heartbeat(0).stale != ""
    assert core.heartbeat(1).stale == ""


def test_a_clear_beside_something_unreadable_proves_nothing(core: Consolidation) -> None:
    core.on_payload(0, with_unreadable(EngineCleared()))
    assert core.heartbeat(0).stale.startswith("engine: unreadable event: ")


def test_the_source_s_own_doubt_is_told_where_we_have_none(core: Consolidation) -> None:
    assert core.heartbeat(0, "engine event not read").stale == "engine event not read"
    core.on_payload(0, b"\xc1")
    assert core.heartbeat(0, "engine event not read").stale.startswith("engine: unreadable batch: ")


# -------------------------------------------------------------------- losses
def test_a_loss_empties_every_rank_by_events_of_the_same_stream(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED))
    core.on_payload(1, b"\xc1")
    assert core.on_loss() == {0}
    assert [core.heartbeat(dp_rank) for dp_rank in core.dp_ranks] == [
        Heartbeat(instance="instance", epoch=1000, last_seq=2),
        Heartbeat(instance="instance", epoch=1001, last_seq=0),
    ]
    assert dumped(core) == []
    assert told(core) == [Batch(1000, 1, STORED_EVENT, 0, 1_500_000_000), Batch(1000, 2, Cleared(), 0, 0)]
    assert core.publishers[SOLE].losses_total == 1


def test_after_a_loss_what_hangs_on_forgotten_blocks_is_not_counted_on(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED))
    core.on_loss()
    orphan = EngineStored(block_hashes=(14,), parent_block_hash=13, token_ids=(7, 8), block_size=BLOCK_SIZE)
    assert core.on_payload(2, payload(orphan, REMOVED)) == set()
    assert core.on_payload(3, payload(STORED)) == {0}
    assert told(core)[2:] == [Batch(1000, 3, STORED_EVENT, 3, 1_500_000_000)]
