"""For any batches, any bytes and any sets: what the wire promises of them.

decode(encode(x)) == x;    any bytes decode or raise MalformedMessage;    what decodes can be encoded again
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol import fleet, recovery
from kv_protocol.codec import BATCHES_PER_MESSAGE_MAX, decode_message, encode_message, split_event
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.journal import (
    FleetApplied,
    JournalMessage,
    JournalRecord,
    LoadApplied,
    decode_journal,
    encode_record,
    pack_journal,
)
from kv_protocol.ledger import LedgerTold, Renewed, Routed, decode_replica, encode_replica
from kv_protocol.load import LoadReport, decode_load, encode_load
from kv_protocol.splitmix import splitmix64
from tests.dumped import dump_chunks
from tests.support.amount import examples
from tests.unit.kv_protocol.test_journal import RECORDS
from tests.unit.router.samples import registered

CALM = settings(max_examples=examples(150))

U64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1])
START = st.integers(1, 2**32 - 20)  # of at most 20 blocks, whose positions are u32s
HASHES = st.lists(U64, min_size=1, max_size=20).map(tuple)
TIER = st.sampled_from(TIERS)
STORED = st.builds(Stored, HASHES, tier=TIER) | st.builds(Stored, HASHES, U64, START, TIER)
EVENTS: st.SearchStrategy[Event] = STORED | st.builds(Removed, HASHES, TIER) | st.builds(Cleared, TIER)
BATCHES = st.lists(
    st.builds(Batch, U64, st.integers(1, 2**64 - 1), EVENTS, U64, st.integers(-(2**63), 2**63 - 1)),
    min_size=1,
    max_size=6,
)

REGISTERED = registered()
HEARTBEAT = fleet.Heartbeat(instance="i", epoch=1, last_seq=2, tiers=(TierDigest(Tier.GPU, 3, 4),))
LOAD = LoadReport(instance="i", iteration=1, running_requests=2, waiting_requests=3, used_blocks=4, total_blocks=5)
ROUTED = Routed(lease_id="l", worker_id="w", dp_rank=0, blocks=b"8 bytes.", uncached_tokens=3, epoch=9)
LEDGER = LedgerTold(router="r", life=1, seq=2, events=(ROUTED, Renewed(lease_id="l")))
REPLAY = recovery.ReplayChunk(request_id=1, epoch=2, last_seq=3, message=b"any")
CHUNK = dump_chunks(1, 2, 3, [recovery.HeldBlock(4, None, 1), recovery.HeldBlock(5, 4, 15)])[0]


def pack(message: JournalMessage) -> bytes:
    return pack_journal(message.life, message.first, len(message.records), *map(encode_record, message.records))


class Wire(NamedTuple):
    """A decoder, its encoder, and a message that is valid."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    valid: bytes


WIRES = {
    "batches": Wire(
        decode_message,
        encode_message,
        encode_message([Batch(1, 1, Stored((1, 2), 3, 4)), Batch(1, 2, Removed((1,))), Batch(1, 3, Cleared())]),
    ),
    "fleet": Wire(fleet.decode_fleet_event, fleet.encode, fleet.encode(REGISTERED)),
    "heartbeat": Wire(fleet.decode_heartbeat, fleet.encode, fleet.encode(HEARTBEAT)),
    "load": Wire(decode_load, encode_load, encode_load(LOAD)),
    "recover request": Wire(
        recovery.decode_recover_request,
        recovery.encode,
        recovery.encode(recovery.RecoverRequest(7, 8, 9, b"\1" * 8192)),
    ),
    "dump chunk": Wire(recovery.decode_answer, recovery.encode, recovery.encode(CHUNK)),
    "replay chunk": Wire(recovery.decode_answer, recovery.encode, recovery.encode(REPLAY)),
    "ledger": Wire(decode_replica, encode_replica, encode_replica(LEDGER)),
    "journal": Wire(decode_journal, pack, pack(JournalMessage(version=1, life=5, first=1, records=tuple(RECORDS)))),
}
DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000, b"\x91" * 100_000, b"\xdd" + b"\xff" * 4]
EACH_WIRE = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
JSON_WIRES = ["fleet", "heartbeat", "load"]
MSGPACK_WIRES = ["recover request", "dump chunk", "replay chunk", "journal", "ledger"]


def decodes_or_is_refused(wire: Wire, data: bytes) -> None:
    """Let any exception but `MalformedMessage` through, and what decodes come through another round unchanged."""
    try:
        message = wire.decode(data)
    except MalformedMessage as error:
        refused = error
    else:
        again = wire.encode(message)
        assert wire.encode(wire.decode(again)) == again  # bytes, for a NaN is not equal to itself
        return
    assert 0 <= refused.offset <= len(data)
    assert refused.reason


@st.composite
def mutations(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return the valid message with a few bytes replaced, dropped or put in between."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


SCALARS = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | U64 | st.integers(-(2**63), 0)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def with_other_values(draw: st.DrawFn, message: Any, values: st.SearchStrategy[Any]) -> Any:
    """Return the message as builtins, something within it replaced by any value at all."""
    if isinstance(message, dict) and message and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(message)))
        return {**message, key: draw(with_other_values(message[key], values))}
    if isinstance(message, list) and message and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(message) - 1))
        return [*message[:at], draw(with_other_values(message[at], values)), *message[at + 1 :]]
    return draw(values)


@CALM
@given(BATCHES)
def test_any_batches_survive_the_wire(batches: list[Batch]) -> None:
    message = encode_message(batches)
    assert decode_message(message) == batches
    assert encode_message(decode_message(message)) == message
    assert int.from_bytes(message[:2], "little") == len(batches) <= BATCHES_PER_MESSAGE_MAX


def fold(held: set[tuple[Tier, int]], event: Event) -> set[tuple[Tier, int]]:
    """Return what a rank holds after `event`."""
    if isinstance(event, Cleared):
        return {(tier, block) for tier, block in held if tier != event.tier}
    named = {(event.tier, block) for block in event.sequence_hashes}
    return held | named if isinstance(event, Stored) else held - named


@CALM
@given(st.sets(st.tuples(TIER, U64)), EVENTS, st.integers(1, 7))
def test_the_parts_of_an_event_do_what_it_does_once_or_twice(
    held: set[tuple[Tier, int]], event: Event, blocks_max: int
) -> None:
    parts, after = list(split_event(event, blocks_max)), held
    for part in parts + parts:
        after = fold(after, part)
    assert after == fold(held, event)


@EACH_WIRE
@CALM
@given(data=st.binary(max_size=200))
def test_any_bytes_decode_or_are_malformed(wire: Wire, data: bytes) -> None:
    decodes_or_is_refused(wire, data)


@EACH_WIRE
def test_what_is_cut_continued_nested_too_deeply_or_no_message_is_malformed(wire: Wire) -> None:
    cut = [wire.valid[:length] for length in range(len(wire.valid))]
    for data in (*cut, wire.valid + b"\0", *DEEP, b"null", b"[]", b"\xff", b"\xc0", b"\x80", b"\x90"):
        with pytest.raises(MalformedMessage) as refused:
            wire.decode(data)
        assert 0 <= refused.value.offset <= len(data)


@EACH_WIRE
@CALM
@given(source=st.data())
def test_any_mutation_of_a_valid_message_decodes_or_is_malformed(wire: Wire, source: st.DataObject) -> None:
    decodes_or_is_refused(wire, source.draw(mutations(wire.valid)))


@pytest.mark.parametrize("name", JSON_WIRES)
@CALM
@given(source=st.data())
def test_any_value_in_the_place_of_any_field_of_json_decodes_or_is_malformed(name: str, source: st.DataObject) -> None:
    valid, values = json.loads(WIRES[name].valid), VALUES | st.integers()
    decodes_or_is_refused(WIRES[name], json.dumps(source.draw(with_other_values(valid, values))).encode())


@pytest.mark.parametrize("name", MSGPACK_WIRES)
@CALM
@given(source=st.data())
def test_any_value_in_the_place_of_any_field_of_msgpack_decodes_or_is_malformed(
    name: str, source: st.DataObject
) -> None:
    valid, values = msgspec.msgpack.decode(WIRES[name].valid), VALUES | st.binary(max_size=40)
    decodes_or_is_refused(WIRES[name], msgspec.msgpack.encode(source.draw(with_other_values(valid, values))))


@CALM
@given(source=st.data())
def test_whatever_a_peer_sends_of_itself_can_be_journalled(source: st.DataObject) -> None:
    for decode, valid in ((decode_load, encode_load(LOAD)), (fleet.decode_fleet_event, fleet.encode(REGISTERED))):
        fields = source.draw(with_other_values(json.loads(valid), U64 | st.integers()))
        try:
            heard = decode(json.dumps(fields).encode())
        except MalformedMessage:
            continue
        record: JournalRecord = (
            LoadApplied(now_s=1.0, worker_id="w-1", dp_rank=0, report=heard)
            if isinstance(heard, LoadReport)
            else FleetApplied(now_s=1.0, event=heard)
        )
        assert decode_journal(pack_journal(5, 1, 1, encode_record(record))).records == (record,)


@CALM
@given(st.lists(st.sampled_from(range(12)) | U64, max_size=60))
def test_a_digest_equals_the_one_worked_out_anew_after_any_changes(toggled: list[int]) -> None:
    digest, held = SetDigest(), set[int]()
    for block in toggled:
        if block in held:
            digest.discard(block)
        else:
            digest.add(block)
        held ^= {block}
        assert digest.total == sum(map(splitmix64, held)) % 2**64
    anew = SetDigest(held)
    assert (digest.block_count, digest.buckets, digest.total) == (len(held), anew.buckets, anew.total)
