import struct
from typing import Any, get_args

import msgspec
import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.decided import (
    Decided,
    RouteRequest,
    best_columns,
    best_terms,
    other_costs,
    overlap_depths,
)
from kv_protocol.decision import Candidate, CostTerms, Decision, Exclusion
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.fleet import FleetEvent
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    MESSAGE_BYTES_MAX,
    RECORD_BYTES_MAX,
    RECORD_PARTS_MAX,
    AttemptEnded,
    CheckpointBegan,
    CheckpointEnded,
    CheckpointPart,
    FleetApplied,
    JournalBegan,
    JournalMessage,
    JournalRecord,
    LearntRates,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    Lost,
    OutcomeKnown,
    PolicyChanged,
    RankStanding,
    RatesRestored,
    RecordPart,
    Refused,
    TimePassed,
    TrustMoved,
    WorkerHeard,
    decode_journal,
    decode_record,
    encode_record,
    in_parts,
    pack_journal,
)
from kv_protocol.ledger import Finished, FirstToken, LedgerEvent, Routed, Unreported
from kv_protocol.load import LoadReport
from tests.unit.kv_protocol.test_fleet import EVENTS

U64_MAX = 2**64 - 1
RANK: dict[str, Any] = {"worker_id": "w-1", "dp_rank": 0}
LEDGER: list[LedgerEvent] = [
    Routed(lease_id="l", blocks=pack_u64((0, 1, U64_MAX)), uncached_tokens=5, **RANK),
    Routed(lease_id="l", blocks=b"", uncached_tokens=0, extra_blocks=1, **RANK),
    FirstToken(lease_id="l"),
    Finished(lease_id="l"),
    Unreported(**RANK),
]
REQUEST = RouteRequest(
    decision_id="d",
    request_id="r",
    model="m",
    isl_tokens=33,
    block_size=16,
    sequence_hashes=pack_u64((0, U64_MAX)),
    preferred_taints=(("big", -0.5),),
    tried=(WorkerRank("w-0", 1),),
)
LEAST: dict[str, Any] = {
    "now_s": 6.0,
    "request": REQUEST,
    "policy": "kv",
    "seed": U64_MAX,
    "kv_seq": 77,
    "turn": 3,
    "ranks": 11,
    "winner": 10,
    "worker_id": "w-10",
    "dp_rank": 0,
    "runner_up": 0,
    "margin": 0.1 + 0.2,
    "reason": "overlap",
}
WEIGHED: dict[str, Any] = LEAST | {
    "best": struct.pack("<3H", 10, 0, 4),
    "terms": b"\x0c" + struct.pack("<6d", 3.0, 4.0, 5.0, 1.5, -0.0, 1e-300),
    "costs": struct.pack("<2f", 7.5, 8.5),
    "overlap": b"\x09" + b"\x01\x04" + struct.pack("<2H", 5, 65535) + b"\x02\x00" + struct.pack("<H", 9),
}
RECORDS: list[JournalRecord] = [
    JournalBegan(now_s=0.1 + 0.2, router="router-1", started_ns=U64_MAX, settings={"a": "b", "c": {"d": 0.5}}),
    LoadApplied(
        now_s=1.0,
        report=LoadReport(
            instance="i", iteration=1, running_requests=2, waiting_requests=3, used_blocks=4, total_blocks=5
        ),
        **RANK,
    ),
    *(LedgerApplied(now_s=2.0, event=event) for event in LEDGER),
    LedgerApplied(now_s=2.0, event=LEDGER[0], router="router-2"),
    *(FleetApplied(now_s=3.0, event=event) for event in EVENTS),
    WorkerHeard(now_s=3.5, worker_id="w-1", instance="i"),
    LogConnection(now_s=3.6, heard=True),
    AttemptEnded(now_s=4.0, outcome="back_pressure", phase="first_byte", reason="503", retry_after_s=5.5, **RANK),
    AttemptEnded(now_s=4.0, outcome="ok", decision_id="d", erred_before=(WorkerRank("w-0", 1),), **RANK),
    PolicyChanged(now_s=5.0, policy={"mode": "kv", "parameters": {"overlap_credit": -0.0}, "itl_target_s": None}),
    TrustMoved(now_s=5.1, trust="DEGRADED", reason="overpredicted", was="EXACT", requests=16, overpredicted=9, **RANK),
    RatesRestored(now_s=5.2, models=(LearntRates("m", 1.5, 0.5, 200.0, 7),)),
    TimePassed(now_s=5.5),
    RankStanding(now_s=5.6, epoch=U64_MAX, doubt="behind", **RANK),
    Decided(**LEAST),
    Decided(**WEIGHED),
    OutcomeKnown(now_s=7.0, decision_id="d", outcome="ok", cached_tokens=32, ttft_s=0.05, duration_s=1.5),
    OutcomeKnown(now_s=7.0, decision_id="d", outcome="ok", ttft_s=0.05, duration_s=1.5, itl_s=0.01, came_whole=False),
    OutcomeKnown(now_s=7.0, decision_id="d", outcome="cancelled"),
    Refused(now_s=8.0, request=REQUEST, exclusions=(Exclusion(reason="draining", **RANK),)),
    Lost(now_s=9.0, count=12),
    RecordPart(now_s=9.1, index=1, count=2, data=b"\x00\xff"),
    CheckpointBegan(now_s=9.2, router="router-1", settings={"lease_s": 5.0}),
    CheckpointPart(now_s=9.2, table="leases", rows=b"\x90"),
    CheckpointEnded(now_s=9.2, parts=1),
]


def test_a_record_longer_than_a_message_is_its_parts_and_one_beyond_their_bound_is_refused() -> None:
    for size in (RECORD_BYTES_MAX, RECORD_BYTES_MAX + 1, 3 * RECORD_BYTES_MAX):
        encoded = bytes(size)
        parts = in_parts(encoded, 1.0)
        assert max(map(len, parts)) <= RECORD_BYTES_MAX
        if size == RECORD_BYTES_MAX:
            assert parts == (encoded,)
            continue
        records = [decode_record(part) for part in parts]
        assert b"".join(each.data for each in records if isinstance(each, RecordPart)) == encoded
        places = [(each.index, each.count) for each in records if isinstance(each, RecordPart)]
        assert places == [(at, len(parts)) for at in range(len(parts))]
    with pytest.raises(LimitExceeded, match="record: found"):
        in_parts(bytes(RECORD_BYTES_MAX * RECORD_PARTS_MAX), 1.0)


def message_of(*records: JournalRecord) -> bytes:
    return pack_journal(5, 9, len(records), *map(encode_record, records))


def kinds(values: list[Any]) -> set[type]:
    return {type(value) for value in values}


def test_every_kind_of_record_and_of_fleet_event_is_among_the_samples() -> None:
    assert kinds(RECORDS) == set(get_args(JournalRecord))
    assert kinds(EVENTS) == set(get_args(FleetEvent))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_bit_for_bit(record: JournalRecord) -> None:
    once = message_of(record)
    read = decode_journal(once)
    assert read == JournalMessage(version=1, life=5, first=9, records=(record,))
    assert message_of(*read.records) == once


def test_a_field_of_a_later_version_of_a_record_is_passed_over() -> None:
    data = pack_journal(5, 9, 1, msgspec.msgpack.encode(["tick", 1.0, [{"deep": None}]]))
    assert decode_journal(data).records == (TimePassed(now_s=1.0),)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["unheard-of", 1.0], r"Invalid value 'unheard-of'"),
        (["heard", "1", "w", "i"], r"Expected `float`, got `str` - at `\$\[3\]\[0\]\[1\]`"),
        (["heard", 1.0, "w"], r"`array` of at least length 4"),
        (["ledger", 1.0, {"type": "left"}], r"Invalid value 'left' - at `\$\[3\]\[0\]\[2\]\.type`"),
        (["fleet", 1.0, {"type": "left", "worker_id": "A.B", "instance": "i"}], r"`\$\[3\]\[0\]\[2\]\.worker_id`"),
        (["standing", 1.0, "w", 4096, 1, ""], r"Expected `int` <= 4095 - at `\$\[3\]\[0\]\[3\]`"),
        (["lost", 1.0, 0], r"Expected `int` >= 1 - at `\$\[3\]\[0\]\[2\]`"),
        (["refused", 1.0, ["d", "r", "m", "x", 16], []], r"\$\[3\]\[0\]\[2\]\[3\]`"),
        (["attempt", 1.0, "w", 0, "bad"], r"\$\[3\]\[0\]\[4\]"),
    ],
)
def test_a_record_that_may_not_be_is_refused_with_its_field(record: list[Any], reason: str) -> None:
    with pytest.raises(MalformedMessage, match=f"journal: .*{reason}"):
        decode_journal(pack_journal(1, 1, 1, msgspec.msgpack.encode(record)))


def test_a_message_of_another_version_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="version: found 2, allowed 1"):
        decode_journal(msgspec.msgpack.encode((2, 1, 1, [])))


def test_a_message_beyond_its_bytes_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=f"{MESSAGE_BYTES_MAX + 1} bytes, at most {MESSAGE_BYTES_MAX} allowed"):
        decode_journal(bytes(MESSAGE_BYTES_MAX + 1))


def test_the_columns_of_a_decision_are_read_as_they_were_packed() -> None:
    decided = Decided(**WEIGHED)
    assert best_columns(decided.best) == (10, 0, 4)
    assert best_terms(decided) == [
        CostTerms(wait_ms=1.5, cost=3.0),
        CostTerms(wait_ms=-0.0, cost=4.0),
        CostTerms(wait_ms=1e-300, cost=5.0),
    ]
    assert other_costs(decided) == (7.5, 8.5)
    depths = overlap_depths(decided)
    assert (depths[0], depths[1], depths[9], depths[10]) == ((5, 5, 5, 5), (0, 0, 0, 9), (0, 0, 0, 0), (65535,) * 4)


def test_depths_beyond_a_u16_are_wide() -> None:
    wide = b"\x81" + b"\x00\x04" + struct.pack("<I", 70_000)
    assert overlap_depths(Decided(**LEAST | {"overlap": wide}))[10] == (70_000,) * 4


def test_a_decision_with_a_number_that_no_router_writes_is_refused() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"winner": -1}, {"ranks": 0}, {"ranks": 1 << 16}, {"seed": -1}, {"worker_id": "W"}, {"dp_rank": 1 << 63},
    )  # fmt: skip
    for changed in changes:
        with pytest.raises(MalformedMessage, match="journal record: "):
            decode_record(encode_record(Decided(**WEIGHED | changed)))


def test_a_request_that_may_not_be_is_refused() -> None:
    for fields, reason in (
        (["d", "r", "m", 1, 0], r"`int` >= 1 - at `\$\[3\]\[0\]\[2\]\[4\]`"),
        (["d", "r", "m", -1, 16], r"`int` >= 0 - at `\$\[3\]\[0\]\[2\]\[3\]`"),
    ):
        record = msgspec.msgpack.encode(["refused", 1.0, fields, []])
        with pytest.raises(MalformedMessage, match=reason):
            decode_journal(pack_journal(1, 1, 1, record))
    halved = msgspec.structs.replace(LEAST["request"], sequence_hashes=b"1234567")
    with pytest.raises(LimitExceeded, match="sequence_hashes: found '7 bytes', allowed 8 bytes a block"):
        Decided(**LEAST | {"request": halved})


def test_a_decision_says_what_it_promised_of_its_request() -> None:
    assert Decided(**LEAST, uncached_tokens=7, epoch=U64_MAX).promise == Routed(
        lease_id="d",
        worker_id="w-10",
        dp_rank=0,
        blocks=REQUEST.sequence_hashes,
        uncached_tokens=7,
        extra_blocks=1,
        epoch=U64_MAX,
    )


CANDIDATES = tuple(
    Candidate(
        worker_id=f"w-{index}",
        dp_rank=index,
        overlap_blocks=(1, 2, 3, 4),
        trust="EXACT",
        trust_reason="",
        epoch=2**64 - 1,
        seq=index,
        terms=CostTerms(cost=float(index)),
    )
    for index in range(3)
)
FIELDS: dict[str, Any] = {
    "decision_id": "d",
    "request_id": "r",
    "model": "m",
    "policy": "kv",
    "seed": 2**64 - 1,
    "now_s": 1.25,
    "block_size": 16,
    "isl_tokens": 100,
    "reusable_blocks": 6,
    "winner": 1,
    "runner_up": 0,
    "margin": 0.1,
    "candidates": CANDIDATES,
    "excluded": (Exclusion(worker_id="w-9", dp_rank=0, reason="draining"),),
}


def test_winner_and_runner_up_are_candidates() -> None:
    for winner in (0, 1, 2):
        assert Decision(**FIELDS | {"winner": winner}).chosen is CANDIDATES[winner]
    for field in ("winner", "runner_up"):
        for index in (-1, 3):
            with pytest.raises(
                LimitExceeded, match=f"^{field}: found {index}, allowed the index of one of 3 candidates"
            ):
                Decision(**FIELDS | {field: index})
    with pytest.raises(LimitExceeded, match=r"^winner: found 0"):
        Decision(**FIELDS | {"candidates": (), "winner": 0, "runner_up": None})


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json], ids=["msgpack", "json"])
def test_a_decision_survives_encoding_bit_for_bit(codec: Any) -> None:
    decision = Decision(**FIELDS)
    assert codec.decode(codec.encode(decision), type=Decision) == decision
