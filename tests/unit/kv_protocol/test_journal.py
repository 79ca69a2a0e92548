from typing import Any, get_args

import msgspec
import pytest

from kv_protocol.decision import Candidate, CostTerms, Decision, Exclusion
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.journal import (
    BreakerChanged,
    Decided,
    FleetApplied,
    JournalRecord,
    KvMessageApplied,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    OutcomeKnown,
    PolicyChanged,
    WorkerHeard,
    decode_journal,
    encode_journal,
)
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Reconciled, Renewed, Routed
from kv_protocol.load import LoadReport

U64_MAX = 2**64 - 1
RANK: dict[str, Any] = {"worker_id": "w-1", "dp_rank": 0}

LEDGER: list[LedgerEvent] = [
    Routed(lease_id="l", blocks=(0, 1, U64_MAX), uncached_tokens=5, **RANK),
    Routed(lease_id="l", blocks=(), uncached_tokens=0, extra_blocks=1, **RANK),
    FirstToken(lease_id="l"),
    Renewed(lease_id="l"),
    Finished(lease_id="l"),
    Cancelled(lease_id="l"),
    Expired(lease_id="l"),
    Reconciled(running_requests=1, waiting_requests=2, used_blocks=3, **RANK),
]
FLEET: list[FleetEvent] = [
    WorkerRegistered(
        worker_id="w-1",
        instance="i",
        model="m",
        served_names=("m", "模型"),
        base_url="http://h:1",
        block_size=16,
        hash_scheme="xxh3-1337",
        tokenizer_digest="t",
        template_digest="c",
        canary=U64_MAX,
    ),
    WorkerDraining(worker_id="w-1", instance="i"),
    WorkerLeft(worker_id="w-1", instance="i", reason="silent"),
]
DECISION = Decision(
    decision_id="d",
    request_id="r",
    model="m",
    policy="kv",
    seed=U64_MAX,
    now_s=0.1,
    block_size=16,
    isl_tokens=33,
    reusable_blocks=2,
    winner=0,
    runner_up=None,
    margin_blocks=None,
    candidates=(
        Candidate(
            overlap_blocks=(2, 2, 2, 2),
            trust="DEGRADED",
            trust_reason="gap",
            epoch=U64_MAX,
            seq=9,
            terms=CostTerms(overlap_credit_blocks=-0.1, prefill_blocks=1e-300, cost=0.1 + 0.2),
            **RANK,
        ),
    ),
    excluded=(Exclusion(reason="breaker", **RANK),),
)
RECORDS: list[JournalRecord] = [
    KvMessageApplied(now_s=0.1 + 0.2, stream_seq=U64_MAX),
    LoadApplied(
        now_s=1.0,
        report=LoadReport(
            instance="i", iteration=1, running_requests=2, waiting_requests=3, used_blocks=4, total_blocks=5
        ),
        **RANK,
    ),
    *(LedgerApplied(now_s=2.0, event=event) for event in LEDGER),
    *(FleetApplied(now_s=3.0, event=event) for event in FLEET),
    WorkerHeard(now_s=3.5, worker_id="w-1", instance="i"),
    LogConnection(now_s=3.6, heard=True),
    LogConnection(now_s=3.7, heard=False),
    BreakerChanged(now_s=4.0, worker_id="w-1", reason="refused", open_until_s=5.5),
    BreakerChanged(now_s=4.0, worker_id="w-1", reason="probe", open_until_s=None),
    PolicyChanged(now_s=5.0, policy="kv", parameters={"overlap_weight": 1.0, "": -0.0}),
    Decided(now_s=6.0, decision=DECISION, sequence_hashes=(0, U64_MAX)),
    Decided(now_s=6.0, decision=DECISION, sequence_hashes=()),
    OutcomeKnown(now_s=7.0, decision_id="d", outcome="finished", cached_tokens=32, ttft_s=0.05, duration_s=1.5),
    OutcomeKnown(now_s=7.0, decision_id="d", outcome="cancelled"),
]


def kinds(values: list[Any]) -> set[type]:
    return {type(value) for value in values}


def test_every_kind_of_record_and_of_event_within_is_among_the_samples() -> None:
    assert kinds(RECORDS) == set(get_args(JournalRecord))
    assert kinds(LEDGER) == set(get_args(LedgerEvent))
    assert kinds(FLEET) == set(get_args(FleetEvent))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_bit_for_bit(record: JournalRecord) -> None:
    once = encode_journal([record])
    read = decode_journal(once)
    assert read == [record]
    assert encode_journal(read) == once


def test_records_keep_their_order() -> None:
    assert decode_journal(encode_journal(RECORDS)) == RECORDS
    assert decode_journal(encode_journal(RECORDS[::-1])) == RECORDS[::-1]


def test_an_empty_journal_message_has_no_records() -> None:
    assert decode_journal(encode_journal([])) == []


def test_a_field_of_a_later_version_is_passed_over() -> None:
    data = msgspec.msgpack.encode([{"type": "kv", "now_s": 1.0, "stream_seq": 2, "later": [{"deep": None}]}])
    assert decode_journal(data) == [KvMessageApplied(now_s=1.0, stream_seq=2)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_truncation_of_a_record_is_refused(record: JournalRecord) -> None:
    data = encode_journal([record])
    for length in range(len(data)):
        with pytest.raises(MalformedMessage, match=r"^malformed at byte 0: journal: "):
            decode_journal(data[:length])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"type": "unheard-of", "now_s": 1.0}, "Invalid value 'unheard-of'"),
        ({"now_s": 1.0, "stream_seq": 1}, "missing required field `type`"),
        ({"type": "kv", "now_s": "1", "stream_seq": 1}, "now_s"),
        ({"type": "ledger", "now_s": 1.0, "event": {"type": "left"}}, "Invalid value 'left'"),
        (
            {"type": "fleet", "now_s": 1.0, "event": {"type": "left", "worker_id": "A.B", "instance": "i"}},
            r"worker_id: found 'A\.B'",
        ),
        (
            {"type": "load", "now_s": 1.0, "report": msgspec.to_builtins(RECORDS[1])["report"] | {"iteration": -1}}
            | RANK,
            "iteration: found -1",
        ),
        (
            {
                "type": "decided",
                "now_s": 1.0,
                "decision": msgspec.to_builtins(DECISION) | {"winner": 1},
                "sequence_hashes": [],
            },
            "winner: found 1",
        ),
    ],
)
def test_a_record_that_may_not_be_is_refused_with_its_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedMessage, match=f"journal: .*{reason}"):
        decode_journal(msgspec.msgpack.encode([record]))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\xc0", b"\x90\x90", b"\x91\xc0", b"\xdd" + b"\xff" * 4, b"\x91" * 100_000,
     b"\x91\x82\xa4type\xa2kv\xa1x" + b"\x91" * 100_000 + b"\xc0"],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_bytes_that_are_no_journal_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match=r"^malformed at byte 0: journal: "):
        decode_journal(data)
