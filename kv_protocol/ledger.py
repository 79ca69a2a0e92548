"""The events of the ledger of promised work, and the messages between routers about it.

Every booking is a lease. It ends by `Finished` or `Cancelled`, or the ledger ends it (`Expired`). The messages are
msgpack on core NATS, not stored.

    LedgerTold    events of a router's own leases, in their order; `seq` counts these messages, from 1
    LedgerBeat    every `BEAT_S`: the router's newest `seq`, and totals of its open leases
    LedgerAsked   a router that missed a message requests the open leases of another
    LedgerOpen    the answer: one part of all leases that were open at `seq`

Told and Beat go to all routers (`subjects.LEDGER`), Asked and Open to one (`subjects.ledger_of`). `life` is the start
time of the router's run, in ns; of two lives the later one counts.
"""

from typing import Annotated, Literal

import msgspec
from xxhash import xxh3_64_intdigest

from kv_protocol.codec import MESSAGE_BYTES_MAX
from kv_protocol.errors import LimitExceeded, decoder_of
from kv_protocol.ids import U64, DpRank, WorkerId

_BLOCK_BYTES = 8
LeaseId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 40) - 1)]
"""Tokens or blocks of one request: sums over all leases of a router still fit 64 bits."""

ExpiryCause = Literal["silence", "engine"]
"""`silence`: no event came for the lease's duration. `engine`: for a while it reported fewer requests than leases."""


class _OfLease(msgspec.Struct, frozen=True, kw_only=True):
    lease_id: LeaseId


class Routed(_OfLease, frozen=True, tag="routed", kw_only=True, gc=False):
    """A request was routed to a rank.

    `blocks` are its sequence hashes (u64s, little-endian, in the order of the chain), `uncached_tokens` the tokens to
    prefill.

    Raises:
        LimitExceeded: `blocks` is cut within a block.
    """

    worker_id: WorkerId
    dp_rank: DpRank
    blocks: bytes
    uncached_tokens: Count
    extra_blocks: Count = 0
    """Blocks of the request without a sequence hash, such as the partial last one."""
    epoch: int = 0
    """Epoch of the rank's stream at that time; 0: none was received."""
    session_id: str = ""
    """The request's session, for affinity; empty: none."""

    def __post_init__(self) -> None:
        if len(self.blocks) % _BLOCK_BYTES:
            raise LimitExceeded("blocks", len(self.blocks), f"a multiple of {_BLOCK_BYTES} bytes")


class FirstToken(_OfLease, frozen=True, tag="first_token", kw_only=True, gc=False):
    """The request's prefill is over; its blocks stay in use."""


class Renewed(_OfLease, frozen=True, tag="renewed", kw_only=True, gc=False):
    """Bytes of the answer still arrive: the lease's timeout starts again."""


class Finished(_OfLease, frozen=True, tag="finished", kw_only=True, gc=False):
    """The request succeeded or failed; its blocks are free."""


class Cancelled(_OfLease, frozen=True, tag="cancelled", kw_only=True, gc=False):
    """The client left; the request's blocks are free."""


class Expired(_OfLease, frozen=True, tag="expired", kw_only=True):
    """The ledger ended the lease."""

    cause: ExpiryCause = "silence"


class Unreported(msgspec.Struct, frozen=True, tag="unreported", kw_only=True):
    """The rank's engine has not reported its load for a while: its last report no longer counts."""

    worker_id: str
    dp_rank: int


LeaseEvent = Routed | FirstToken | Renewed | Finished | Cancelled | Expired
"""What replicas exchange: not `Unreported`, because each replica receives load reports itself."""
LedgerEvent = LeaseEvent | Unreported


BEAT_S = 1.0
EVENTS_MAX = 1024
"""The most events, or open leases, in one message."""
BYTES_MAX = MESSAGE_BYTES_MAX // 2
"""A message is filled up to this size; only one with a single event may be larger."""
BLOCKS_MAX = BYTES_MAX // 8
"""The most hashes of one lease that are sent; its further blocks are only counted, in `extra_blocks`."""
PARTS_MAX = 256


class OpenLease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An open lease, and whether its prefill is over."""

    routed: Routed
    is_prefilled: bool


class LedgerTold(msgspec.Struct, frozen=True, tag="told", kw_only=True):
    """Events of a router's own leases since its last message."""

    router: WorkerId
    life: U64
    seq: U64
    events: Annotated[tuple[LeaseEvent, ...], msgspec.Meta(max_length=EVENTS_MAX)]


class LedgerBeat(msgspec.Struct, frozen=True, tag="beat", kw_only=True):
    """Totals of the router's open leases after message `seq`: `digest` is the sum of `lease_digest`, modulo 2^64."""

    router: WorkerId
    life: U64
    seq: U64
    leases: U64
    digest: U64
    queued_tokens: U64
    blocks: U64


class LedgerAsked(msgspec.Struct, frozen=True, tag="asked", kw_only=True):
    """`router` requests open leases; the answer repeats `number`."""

    router: WorkerId
    number: U64


class LedgerOpen(msgspec.Struct, frozen=True, tag="open", kw_only=True):
    """Part number `part` (from 0) of the `parts` parts of all leases that were open at `seq`."""

    router: WorkerId
    life: U64
    seq: U64
    number: U64
    part: U64
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_MAX)]
    leases: Annotated[tuple[OpenLease, ...], msgspec.Meta(max_length=EVENTS_MAX)]

    def __post_init__(self) -> None:
        if self.part >= self.parts:
            raise LimitExceeded("part", self.part, f"less than parts ({self.parts})")


ReplicaMessage = LedgerTold | LedgerBeat | LedgerAsked | LedgerOpen

_decoder: msgspec.msgpack.Decoder[ReplicaMessage] = msgspec.msgpack.Decoder(ReplicaMessage)
encode_replica = msgspec.msgpack.Encoder().encode
decode_replica = decoder_of("ledger message", _decoder.decode, 2 * MESSAGE_BYTES_MAX)


def lease_digest(lease_id: str, *, is_prefilled: bool) -> int:
    """Return a lease's term of the digest: xxh3-64 of its id, seed 1 once its prefill is over, else 0."""
    return xxh3_64_intdigest(lease_id.encode(), seed=int(is_prefilled))
