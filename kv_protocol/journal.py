"""A router's journal: every input that a decision may read, in the order in which it was applied, and every decision.

The view is a fold over these records, so that a recorded decision can be taken again, bit for bit. `now_s` is the time
used when the record was applied (the router's monotonic clock, seconds). Source: `interfaces.md`, "The router's
journal".
"""

import msgspec

from kv_protocol.decision import Decision
from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.fleet import FleetEvent
from kv_protocol.ledger import LedgerEvent
from kv_protocol.load import LoadReport


class KvMessageApplied(msgspec.Struct, frozen=True, tag="kv", kw_only=True):
    """The message at `stream_seq` of `KV_EVENTS` was applied; its bytes stay in the log."""

    now_s: float
    stream_seq: int


class LoadApplied(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    """A rank's load report was applied."""

    now_s: float
    worker_id: str
    dp_rank: int
    report: LoadReport


class LedgerApplied(msgspec.Struct, frozen=True, tag="ledger", kw_only=True):
    """A ledger event was applied."""

    now_s: float
    event: LedgerEvent


class FleetApplied(msgspec.Struct, frozen=True, tag="fleet", kw_only=True):
    """A fleet event was applied."""

    now_s: float
    event: FleetEvent


class WorkerHeard(msgspec.Struct, frozen=True, tag="heard", kw_only=True):
    """A worker's heartbeat came."""

    now_s: float
    worker_id: str
    instance: str


class LogConnection(msgspec.Struct, frozen=True, tag="log", kw_only=True):
    """The event log can be heard from now on, or cannot."""

    now_s: float
    heard: bool


class BreakerChanged(msgspec.Struct, frozen=True, tag="breaker", kw_only=True):
    """A rank's circuit breaker opened (until `open_until_s`) or closed (None)."""

    now_s: float
    worker_id: str
    reason: str
    open_until_s: float | None


class PolicyChanged(msgspec.Struct, frozen=True, tag="policy", kw_only=True):
    """Another policy, or other parameters of it, hold from now on."""

    now_s: float
    policy: str
    parameters: dict[str, float]


class Decided(msgspec.Struct, frozen=True, tag="decided", kw_only=True):
    """A decision, with the request's sequence hashes, from which it can be taken again."""

    now_s: float
    decision: Decision
    sequence_hashes: tuple[int, ...]


class OutcomeKnown(msgspec.Struct, frozen=True, tag="outcome", kw_only=True):
    """How a decision turned out: what the worker says it reused of the prompt, and when tokens came."""

    now_s: float
    decision_id: str
    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None


JournalRecord = (
    KvMessageApplied
    | LoadApplied
    | LedgerApplied
    | FleetApplied
    | WorkerHeard
    | LogConnection
    | BreakerChanged
    | PolicyChanged
    | Decided
    | OutcomeKnown
)

_decoder = msgspec.msgpack.Decoder(list[JournalRecord])
_encode = msgspec.msgpack.Encoder().encode


def encode_journal(records: list[JournalRecord]) -> bytes:
    """Return one journal message."""
    return _encode(records)


def decode_journal(data: bytes) -> list[JournalRecord]:
    """Return the records of a journal message; raise `MalformedMessage` for anything else."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"journal: {error}") from error
