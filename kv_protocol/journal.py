"""A router's journal: every input of decisions, in the order in which it was applied, and every decision.

The view is a fold over these records, so a recorded decision can be repeated bit for bit. `now_s` is the time at which
the record was applied (the router's monotonic clock, seconds). The index's own inputs stay in the event log; its answer
is recorded with each decision. Source: `docs/WIRE.md`.

    message = msgpack [version 1, life u64, first u64, records]     at most 512 KiB
    record  = msgpack [kind, now_s, field, ...]                     in the order of the fields; later versions add some

Records of one life (one run of a router) are numbered from 1 without holes; `first` is the number of the first one in
the message. `Lost` takes as many numbers as the records that it replaces, so readers notice every missing record.

A record longer than `RECORD_BYTES_MAX` is written as consecutive `RecordPart`s, one number each: every record in a
message is bounded, also with a prompt of megabytes.

A checkpoint has all inputs of decisions, so that replay can start there: `CheckpointBegan`, a `RankStanding` of each
rank of the fleet that the index reported, `CheckpointPart`s, `CheckpointEnded`, with no other record between them. The
tables are those of `router/journal/encoder.py` and of the core (`router/native/core.cpp`), in the writer's version.
A router of another version refuses unknown tables, and its replay starts at a later checkpoint.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from kv_protocol.decided import Decided, RouteRequest
from kv_protocol.decision import Exclusion, TrustState
from kv_protocol.errors import LimitExceeded, decoder_of
from kv_protocol.fleet import FleetEvent
from kv_protocol.ids import U64, DpRank, WorkerId, WorkerRank
from kv_protocol.ledger import Cancelled, Finished, LedgerEvent
from kv_protocol.load import LoadReport

VERSION = 1
MESSAGE_BYTES_MAX = 512 * 1024
RECORD_BYTES_MAX = MESSAGE_BYTES_MAX - 64
"""The most bytes of records in a message, and so of one record."""
RECORD_PARTS_MAX = 128
"""The most parts of one record: 64 MiB, enough for the hashes of a prompt of 8 Mi blocks."""
_PART_BYTES_MAX = RECORD_BYTES_MAX - 64

RATE_FACTOR_MAX, OUTPUT_TOKENS_MAX = 64.0, 1e6
RateFactor = Annotated[float, msgspec.Meta(ge=1 / RATE_FACTOR_MAX, le=RATE_FACTOR_MAX)]

AttemptOutcome = Literal["ok", "client_fault", "back_pressure", "erred", "failed", "cancelled"]
"""In this order: answered; refused for the client's fault (4xx); too busy (429, 503); status 500 and other 5xx, which
the request may have caused; the worker's fault (connect, cut, timeout, 502, 504, redirect); nobody's fault: the client
left, the router was at a limit, or the request moved from a worker that left."""


class _Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    now_s: float


class JournalBegan(_Record, frozen=True, tag="began", kw_only=True):
    """A router started with an empty state, made from these settings; earlier records are of another life.

    `settings` has every setting of the state by name (`router/decision/state.py`).
    """

    router: WorkerId
    started_ns: U64
    """Wall time, since 1970."""
    settings: dict[str, Any]


class FleetApplied(_Record, frozen=True, tag="fleet", kw_only=True):
    """A fleet event was applied."""

    event: FleetEvent


class WorkerHeard(_Record, frozen=True, tag="heard", kw_only=True):
    """A worker's heartbeat was received."""

    worker_id: str
    instance: str


class LogConnection(_Record, frozen=True, tag="log", kw_only=True):
    """The connection to the event log was restored (`heard`) or lost."""

    heard: bool


class LoadApplied(_Record, frozen=True, tag="load", kw_only=True):
    """A rank's load report was applied."""

    worker_id: str
    dp_rank: int
    report: LoadReport


class LedgerApplied(_Record, frozen=True, tag="ledger", kw_only=True):
    """A ledger event was applied: this router's own, or that of the replica `router`."""

    event: LedgerEvent
    router: str = ""


class PolicyChanged(_Record, frozen=True, tag="policy", kw_only=True):
    """The policy changed: all fields of the new one, by name."""

    policy: dict[str, Any]


class LearntRates(msgspec.Struct, frozen=True, array_like=True):
    """The mean factors of a model's ranks, and the expected tokens of an answer, after `answers` answers.

    The factors are multiples of what the reference engine needs (`router/native/costs.hpp`).
    """

    model: str
    prefill: RateFactor
    decode: RateFactor
    output_tokens: Annotated[float, msgspec.Meta(gt=0.0, le=OUTPUT_TOKENS_MAX)]
    answers: Annotated[int, msgspec.Meta(ge=0)]


class RatesRestored(_Record, frozen=True, tag="rates", kw_only=True):
    """A router started with the rates that a former life had learnt."""

    models: tuple[LearntRates, ...]


class AttemptEnded(_Record, frozen=True, tag="attempt", kw_only=True):
    """An attempt at a rank ended. `phase` is the one that failed: connect, first_byte, body; empty: none.

    `decision_id` names its lease. For an "ok" attempt, `erred_before` has the ranks at which earlier attempts of
    the same request ended as "erred".
    """

    worker_id: str
    dp_rank: int
    outcome: AttemptOutcome
    phase: str = ""
    reason: str = ""
    retry_after_s: float | None = None
    decision_id: str = ""
    erred_before: tuple[WorkerRank, ...] = ()


class TimePassed(_Record, frozen=True, tag="tick", kw_only=True):
    """A tick: expired state was removed."""


class RankStanding(_Record, frozen=True, tag="standing", kw_only=True):
    """The index's status of a rank changed: the epoch of its stream, and the doubt about its blocks (empty: none).

    It takes effect with the next decision that reads it.
    """

    worker_id: WorkerId
    dp_rank: DpRank
    epoch: U64
    doubt: str


OutcomeName = Literal["ok", "refused", "failed", "cancelled"]


class OutcomeKnown(_Record, frozen=True, tag="outcome", kw_only=True, gc=False):
    """The outcome of a decision: the cached tokens that the worker reported, and latencies. Its lease is over.

    Times are in seconds; `ttft_s` and `itl_s` (mean between tokens) are None if unknown (`router/native/answer.hpp`).
    `came_whole`: no first token was recorded before.
    """

    decision_id: str
    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    output_tokens: int | None = None
    itl_s: float | None = None
    came_whole: bool = False

    @property
    def ending(self) -> Finished | Cancelled:
        """The ledger event that ended the lease."""
        kind = Cancelled if self.outcome == "cancelled" else Finished
        return kind(lease_id=self.decision_id)


class TrustMoved(_Record, frozen=True, tag="trust", kw_only=True):
    """The trust in a rank changed, and the evidence. For readers: no decision depends on the record.

    `reason` explains the new state, `was_reason` the former one. If requests are the evidence
    (`router/fleet/trust.py`), `overpredicted` and `underpredicted` count some of the rank's last `requests` requests;
    `newest_decision` is the decision about the last one.
    """

    worker_id: WorkerId
    dp_rank: DpRank
    trust: TrustState
    reason: str
    was: TrustState
    was_reason: str = ""
    requests: int = 0
    overpredicted: int = 0
    underpredicted: int = 0
    newest_decision: str = ""


class Refused(_Record, frozen=True, tag="refused", kw_only=True):
    """No rank was eligible for a request; `exclusions` has the reason for every rank.

    Eligibility does not depend on the request's hashes: the record has none.
    """

    request: RouteRequest
    exclusions: tuple[Exclusion, ...]


class Lost(_Record, frozen=True, tag="lost", kw_only=True):
    """`count` records at this place were dropped: the log was away or too slow."""

    count: Annotated[int, msgspec.Meta(ge=1)]


class RecordPart(_Record, frozen=True, tag="part", kw_only=True):
    """The part `index` of `count` of a longer record: the joined bytes of all parts are that record."""

    index: int
    count: Annotated[int, msgspec.Meta(ge=1, le=RECORD_PARTS_MAX)]
    data: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise LimitExceeded("index", self.index, f"0..{self.count - 1}")


class CheckpointBegan(_Record, frozen=True, tag="checkpoint", kw_only=True):
    """A checkpoint of the state follows, as of the tick at `now_s`."""

    router: WorkerId
    settings: dict[str, Any]


class CheckpointPart(_Record, frozen=True, tag="checkpoint_part", kw_only=True):
    """Rows of one table: `rows` is a msgpack list of them."""

    table: str
    rows: bytes


class CheckpointEnded(_Record, frozen=True, tag="checkpoint_end", kw_only=True):
    """The checkpoint is complete if `parts` parts came before."""

    parts: U64


JournalRecord = (
    JournalBegan
    | FleetApplied
    | WorkerHeard
    | LogConnection
    | LoadApplied
    | LedgerApplied
    | AttemptEnded
    | PolicyChanged
    | RatesRestored
    | TimePassed
    | RankStanding
    | TrustMoved
    | Decided
    | OutcomeKnown
    | Refused
    | Lost
    | RecordPart
    | CheckpointBegan
    | CheckpointPart
    | CheckpointEnded
)


class JournalMessage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Consecutive records of one life; `first` is the number of the first of them."""

    version: int
    life: U64
    first: U64
    records: tuple[JournalRecord, ...]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise LimitExceeded("version", self.version, str(VERSION))


_encoder = msgspec.msgpack.Encoder()
_ARRAY_OF_4, _LONG_ARRAY = b"\x94", b"\xdd"
"""How msgpack begins a list of four, and a list with a u32 length."""
encode_record = _encoder.encode
_record_decoder: msgspec.msgpack.Decoder[JournalRecord] = msgspec.msgpack.Decoder(JournalRecord)
decode_record = decoder_of("journal record", _record_decoder.decode)
"""Decodes a record, also from the joined bytes of its parts."""
decode_journal = decoder_of("journal", msgspec.msgpack.Decoder(JournalMessage).decode, MESSAGE_BYTES_MAX)
"""Decodes a message. An error names the place as `$[3][record][field]`: field 0 is the kind, 1 is `now_s`."""


def in_parts(encoded: bytes, now_s: float) -> Sequence[bytes]:
    """Return `encoded` itself, or its `RecordPart`s of at most `RECORD_BYTES_MAX` bytes each.

    Raises:
        LimitExceeded: it would take more than `RECORD_PARTS_MAX` parts.
    """
    if len(encoded) <= RECORD_BYTES_MAX:
        return (encoded,)
    count = -(-len(encoded) // _PART_BYTES_MAX)
    if count > RECORD_PARTS_MAX:
        raise LimitExceeded("record", f"{len(encoded)} bytes", f"{RECORD_PARTS_MAX * _PART_BYTES_MAX}")
    slices = (encoded[at : at + _PART_BYTES_MAX] for at in range(0, len(encoded), _PART_BYTES_MAX))
    return [
        encode_record(RecordPart(now_s=now_s, index=index, count=count, data=data)) for index, data in enumerate(slices)
    ]


def pack_journal(life: int, first: int, count: int, *encoded: bytes) -> bytes:
    """Return a message of `count` encoded records, single or joined; the caller respects `MESSAGE_BYTES_MAX`."""
    head = map(_encoder.encode, (VERSION, life, first))
    return b"".join((_ARRAY_OF_4, *head, _LONG_ARRAY, count.to_bytes(4), *encoded))
