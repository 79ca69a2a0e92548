"""Messages between routers about promised work. msgpack on core NATS, not stored.

    LedgerTold    events of a router's own leases, in their order; `seq` counts these messages, from 1
    LedgerBeat    every `BEAT_S`: the router's newest `seq`, and totals of its open leases
    LedgerAsked   a router that missed a message requests the open leases of another
    LedgerOpen    the answer: one part of all leases that were open at `seq`

Told and Beat go to all routers (`subjects.ledger`), Asked and Open to one (`subjects.ledger_of`). `life` is the start
time of the router's run, in ns; the later of two counts.
"""

from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from kv_protocol.codec import MESSAGE_BYTES_MAX
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.ids import checked_dp_rank, checked_u64, checked_worker_id
from kv_protocol.ledger import LeaseEvent, Routed

BEAT_S = 1.0
EVENTS_MAX = 1024
"""Events of one message."""
BYTES_MAX = MESSAGE_BYTES_MAX // 2
"""Size to which a message is filled; a single lease may add as much again."""
BLOCKS_MAX = BYTES_MAX // 8
"""Hashes of one lease: further blocks are sent as blocks without a hash."""
PARTS_MAX = 256
LEASE_ID_MAX = 128

U64 = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class OpenLease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An open lease, and whether its prefill is over."""

    routed: Routed
    is_prefilled: bool


class LedgerTold(msgspec.Struct, frozen=True, tag="told", kw_only=True):
    """Events of a router's own leases since its last message."""

    router: Name
    life: U64
    seq: U64
    events: Annotated[tuple[LeaseEvent, ...], msgspec.Meta(max_length=EVENTS_MAX)]


class LedgerBeat(msgspec.Struct, frozen=True, tag="beat", kw_only=True):
    """Totals of the router's open leases after message `seq`: `digest` is the sum of `lease_digest`, modulo 2^64."""

    router: Name
    life: U64
    seq: U64
    leases: U64
    digest: U64
    queued_tokens: U64
    blocks: U64


class LedgerAsked(msgspec.Struct, frozen=True, tag="asked", kw_only=True):
    """`router` requests open leases; the answer repeats `number`."""

    router: Name
    number: U64


class LedgerOpen(msgspec.Struct, frozen=True, tag="open", kw_only=True):
    """Part `part`, from 0, of `parts`, of the leases open at `seq`."""

    router: Name
    life: U64
    seq: U64
    number: U64
    part: U64
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_MAX)]
    leases: Annotated[tuple[OpenLease, ...], msgspec.Meta(max_length=EVENTS_MAX)]


ReplicaMessage = LedgerTold | LedgerBeat | LedgerAsked | LedgerOpen

_decoder: msgspec.msgpack.Decoder[ReplicaMessage] = msgspec.msgpack.Decoder(ReplicaMessage)
encode_replica = msgspec.msgpack.Encoder().encode


def decode_replica(data: bytes) -> ReplicaMessage:
    """Return the message in `data`; raise `MalformedMessage`, with the reason, for anything else."""
    if len(data) > 2 * MESSAGE_BYTES_MAX:
        raise MalformedMessage(0, f"ledger message: {len(data)} bytes, at most {2 * MESSAGE_BYTES_MAX} allowed")
    try:
        message = _decoder.decode(data)
        _check(message)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"ledger message: {error}") from error
    return message


def _check(message: ReplicaMessage) -> None:
    checked_worker_id(message.router)
    if isinstance(message, LedgerTold):
        for event in message.events:
            _check_lease(event)
    elif isinstance(message, LedgerOpen):
        for lease in message.leases:
            _check_lease(lease.routed)
        if message.part >= message.parts:
            raise LimitExceeded("part", message.part, f"less than parts ({message.parts})")
    elif isinstance(message, LedgerBeat):
        checked_u64("digest", message.digest)


def _check_lease(event: LeaseEvent) -> None:
    if not 0 < len(event.lease_id) <= LEASE_ID_MAX:
        raise LimitExceeded("lease_id", event.lease_id[:LEASE_ID_MAX], f"1..{LEASE_ID_MAX} characters")
    if isinstance(event, Routed):
        checked_worker_id(event.worker_id)
        checked_dp_rank(event.dp_rank)


def lease_digest(lease_id: str, *, is_prefilled: bool) -> int:
    """Return a lease's term of the digest: xxh3-64 of its id, seed 1 once its prefill is over, else 0."""
    return xxh3_64_intdigest(lease_id.encode(), seed=int(is_prefilled))
