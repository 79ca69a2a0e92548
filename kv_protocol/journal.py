"""A router's journal: every input that a decision may read, in the order in which it was applied, and every decision.

The view is a fold over these records, so that a recorded decision can be taken again, bit for bit. `now_s` is the time
used when the record was applied (the router's monotonic clock, seconds). Of the index, whose own inputs stay in the
event log, its answer is recorded with each decision. Source: `docs/WIRE.md`.

    message = msgpack [version 1, life u64, first u64, records]     at most 512 KiB
    record  = msgpack [kind, now_s, field, ...]                     in the order of the fields; later ones may follow

Records of one life are numbered from 1 without holes; `first` is the number of the message's first. `Lost` takes as
many numbers as it stands for, so that whoever reads finds out about all that is not there.

A record longer than `RECORD_BYTES_MAX` is written as `RecordPart`s, one number each, one behind the other: so every
record in a message has a bound, and a prompt of megabytes ends no journal.

A checkpoint (`checkpoint.py`) holds all that a decision may read, so that replay can start there: `CheckpointBegan`,
a `RankStanding` of each rank of the fleet that the index spoke of, `CheckpointPart`s, `CheckpointEnded`, with no other
record between them.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from kv_protocol.checkpoint import CheckpointBegan, CheckpointEnded, CheckpointPart
from kv_protocol.decided import Decided, RequestRecord
from kv_protocol.decision import Exclusion
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.fleet import FleetEvent
from kv_protocol.ids import WorkerRank, checked_dp_rank, checked_u64, checked_worker_id
from kv_protocol.ledger import Cancelled, Finished, LedgerEvent
from kv_protocol.load import LoadReport

VERSION = 1
MESSAGE_BYTES_MAX = 512 * 1024
RECORD_BYTES_MAX = MESSAGE_BYTES_MAX - 64
"""Room for records in a message, and so for one."""
RECORD_PARTS_MAX = 128
"""Parts of one record: 64 MiB, the hashes of a prompt of 8 Mi blocks."""
_PART_BYTES_MAX = RECORD_BYTES_MAX - 64

AttemptOutcome = Literal["ok", "client_fault", "back_pressure", "erred", "failed", "cancelled"]
"""Answered; refused for the client's fault (4xx); too busy (429, 503); status 500 and other 5xx, which may be the
request's own fault; the worker's fault (connect, cut, timeout, 502, 504, redirect); the client left."""


class JournalBegan(msgspec.Struct, frozen=True, tag="began", array_like=True, kw_only=True):
    """A router's life began with an empty state, made from these settings; what comes before is of another life.

    `settings` is all that the state is made of, by name (`router/decision/state_settings.py`).
    """

    now_s: float
    router: str
    started_ns: int
    """Wall time, since 1970."""
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        checked_worker_id(self.router)
        checked_u64("started_ns", self.started_ns)


class FleetApplied(msgspec.Struct, frozen=True, tag="fleet", array_like=True, kw_only=True):
    """A fleet event was applied."""

    now_s: float
    event: FleetEvent


class WorkerHeard(msgspec.Struct, frozen=True, tag="heard", array_like=True, kw_only=True):
    """A worker's heartbeat came."""

    now_s: float
    worker_id: str
    instance: str


class LogConnection(msgspec.Struct, frozen=True, tag="log", array_like=True, kw_only=True):
    """The event log can be heard from now on, or cannot."""

    now_s: float
    heard: bool


class LoadApplied(msgspec.Struct, frozen=True, tag="load", array_like=True, kw_only=True):
    """A rank's load report was applied."""

    now_s: float
    worker_id: str
    dp_rank: int
    report: LoadReport


class LedgerApplied(msgspec.Struct, frozen=True, tag="ledger", array_like=True, kw_only=True):
    """A ledger event was applied: this router's own, or that of the replica `router`."""

    now_s: float
    event: LedgerEvent
    router: str = ""


class PolicyChanged(msgspec.Struct, frozen=True, tag="policy", array_like=True, kw_only=True):
    """This policy holds from now on: all of its fields, by name."""

    now_s: float
    policy: dict[str, Any]


class AttemptEnded(msgspec.Struct, frozen=True, tag="attempt", array_like=True, kw_only=True):
    """An attempt at a rank ended. `phase` is where it failed: connect, first_byte, body; empty: nowhere.

    `decision_id` is that of its lease; `erred_before` the ranks at which an earlier attempt at this very request ended
    as "erred", where this one is "ok".
    """

    now_s: float
    worker_id: str
    dp_rank: int
    outcome: AttemptOutcome
    phase: str = ""
    reason: str = ""
    retry_after_s: float | None = None
    decision_id: str = ""
    erred_before: tuple[WorkerRank, ...] = ()


class TimePassed(msgspec.Struct, frozen=True, tag="tick", array_like=True, kw_only=True):
    """Time was let pass: what was over by now is gone."""

    now_s: float


class RankStanding(msgspec.Struct, frozen=True, tag="standing", array_like=True, kw_only=True):
    """The index's word on a rank, from the next decision on that reads it: its stream's epoch, and what speaks
    against its blocks (empty: nothing)."""  # noqa: D205, D209

    now_s: float
    worker_id: str
    dp_rank: int
    epoch: int
    doubt: str

    def __post_init__(self) -> None:
        checked_worker_id(self.worker_id)
        checked_dp_rank(self.dp_rank)
        checked_u64("epoch", self.epoch)


class OutcomeKnown(msgspec.Struct, frozen=True, tag="outcome", array_like=True, kw_only=True, gc=False):
    """How a decision turned out: what the worker says it reused of the prompt, and when tokens came. Its lease is over.

    Seconds; `ttft_s` and `itl_s` are None where they are not known (`router/request/latency.py`). `came_whole`: no
    first token was recorded before. Where that is None a former version wrote the record: it took the duration of an
    answer that came whole for its `ttft_s`, and is folded as that version folded it.
    """

    now_s: float
    decision_id: str
    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    output_tokens: int | None = None
    itl_s: float | None = None
    came_whole: bool | None = None

    @property
    def mean_itl_s(self) -> float | None:
        """Mean seconds between the answer's tokens; None where it is not known."""
        if self.came_whole is not None or self.ttft_s is None or self.duration_s is None:
            return self.itl_s
        later_tokens = (self.output_tokens or 0) - 1
        return (self.duration_s - self.ttft_s) / later_tokens if later_tokens > 0 else None

    @property
    def ending(self) -> Finished | Cancelled:
        """What ended the lease."""
        kind = Cancelled if self.outcome == "cancelled" else Finished
        return kind(lease_id=self.decision_id)

    @property
    def is_unstreamed(self) -> bool:
        """Whether the answer came whole: its end is the first that is recorded of it."""
        if self.came_whole is not None:
            return self.came_whole
        return self.ttft_s is not None and self.ttft_s == self.duration_s


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True, kw_only=True):
    """Nobody could take a request; `exclusions` says for every rank why not.

    Which ranks may take a request does not depend on its hashes: the record has none.
    """

    now_s: float
    request: RequestRecord
    exclusions: tuple[Exclusion, ...]


class Lost(msgspec.Struct, frozen=True, tag="lost", array_like=True, kw_only=True):
    """`count` records that stood here were given up: the log was away, or slower than they came."""

    now_s: float
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise LimitExceeded("count", self.count, "1 or more")


class RecordPart(msgspec.Struct, frozen=True, tag="part", array_like=True, kw_only=True):
    """The part `index` of `count` of a longer record: the bytes of all parts, in their order, are that record."""

    now_s: float
    index: int
    count: int
    data: bytes

    def __post_init__(self) -> None:
        if not 1 <= self.count <= RECORD_PARTS_MAX:
            raise LimitExceeded("count", self.count, f"1..{RECORD_PARTS_MAX}")
        if not 0 <= self.index < self.count:
            raise LimitExceeded("index", self.index, f"0..{self.count - 1}")


JournalRecord = (
    JournalBegan
    | FleetApplied
    | WorkerHeard
    | LogConnection
    | LoadApplied
    | LedgerApplied
    | AttemptEnded
    | PolicyChanged
    | TimePassed
    | RankStanding
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
    """Records of one life, in their order; `first` is the number of the first of them."""

    version: int
    life: int
    first: int
    records: tuple[JournalRecord, ...]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise LimitExceeded("version", self.version, str(VERSION))
        checked_u64("life", self.life)
        checked_u64("first", self.first)


_encoder = msgspec.msgpack.Encoder()
_ARRAY_OF_4, _LONG_ARRAY = b"\x94", b"\xdd"
"""How msgpack begins a list of four, and one whose length follows as a u32."""
_decoder = msgspec.msgpack.Decoder(JournalMessage)
_cutter = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw, list[list[msgspec.Raw]]])
_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(JournalRecord)}
_IN_RECORD = re.compile(r"\$\[3\]\[(\d+)\]\[(\d+)\](?:\[(\d+)\])?")
encode_record = _encoder.encode
_record_decoder: msgspec.msgpack.Decoder[JournalRecord] = msgspec.msgpack.Decoder(JournalRecord)


def in_parts(encoded: bytes, now_s: float) -> Sequence[bytes]:
    """Return the records, each of at most `RECORD_BYTES_MAX` bytes, as which `encoded` is written: itself, or parts.

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


def decode_record(data: bytes) -> JournalRecord:
    """Return the record that the parts' bytes are; raise `MalformedMessage` for anything else."""
    try:
        return _record_decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"journal record: {error}") from error


def pack_journal(life: int, first: int, encoded: Sequence[bytes]) -> bytes:
    """Return one message of records that `encode_record` made; the caller keeps to `MESSAGE_BYTES_MAX`."""
    head = map(_encoder.encode, (VERSION, life, first))
    return b"".join((_ARRAY_OF_4, *head, _LONG_ARRAY, len(encoded).to_bytes(4), *encoded))


def decode_journal(data: bytes) -> JournalMessage:
    """Return a journal message; raise `MalformedMessage`, which names the field, for anything else."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(MESSAGE_BYTES_MAX, f"journal: {len(data)} bytes, at most {MESSAGE_BYTES_MAX} allowed")
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"journal: {_named(str(error), data)}") from error


def _named(reason: str, data: bytes) -> str:
    """Return the reason with the names of the record and the field that it means by their places."""
    found = _IN_RECORD.search(reason)
    if found is None:
        return reason
    record, field_index, inner = found.groups()
    try:
        kind = _KINDS[msgspec.msgpack.decode(_cutter.decode(data)[3][int(record)][0], type=str)]
    except (*UNDECODABLE, KeyError):  # what is behind the field may be worse
        return reason
    if field_index == "0":
        return reason
    named = f"$[3][{record}] {kind.__struct_config__.tag}.{kind.__struct_fields__[int(field_index) - 1]}"
    if inner is not None and named.endswith(".request"):
        named += f".{RequestRecord.__struct_fields__[int(inner)]}"
    elif inner is not None:
        named += f"[{inner}]"
    return reason.replace(found[0], named)
