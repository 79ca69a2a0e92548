"""Messages of the log in lines: what a batch did, which workers came and went, and what cannot be read."""

import json

import msgspec
import pytest

from indexer.service.log_lines import BeatLine, EventLine, FleetLine, Line, beat_line, event_lines, fleet_line, text
from kv_protocol import codec, fleet, subjects
from kv_protocol.digest import TierDigest
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat, WorkerDraining, WorkerLeft
from kv_protocol.ids import WorkerRank
from tests.unit.router.samples import registered

SUBJECT = subjects.events("m", WorkerRank("w0", 3))
EPOCH = 0xABCDEF0112345678


def lines(*batches: Batch) -> list[Line]:
    return list(event_lines(SUBJECT, codec.encode_message(batches), time_ns=5, stream_seq=9))


def batches(first_seq: int, *events: Event, epoch: int = EPOCH) -> list[Batch]:
    return [Batch(epoch, first_seq + at, event) for at, event in enumerate(events)]


def spans(found: list[Line]) -> list[tuple[int, int, str, str, int]]:
    told = [line for line in found if isinstance(line, EventLine)]
    assert len(told) == len(found)
    return [(line.first_seq, line.last_seq, line.kind, line.medium, line.blocks) for line in told]


def test_a_batch_is_a_line_with_all_that_is_known_of_it() -> None:
    (line,) = lines(*batches(4, Stored((11, 12), parent=10, start=1, tier=Tier.HOST)))
    assert line == EventLine(
        time_ns=5,
        stream_seq=9,
        worker_id="w0",
        dp_rank=3,
        epoch=EPOCH,
        first_seq=4,
        last_seq=4,
        kind="stored",
        medium="host",
        blocks=2,
        first_hash=11,
        parent=10,
    )
    assert text(line, "noon") == "noon 9 w0/3 12345678 4 stored host 2 blocks from 11 behind 10"


def test_batches_in_a_row_that_do_the_same_on_the_same_medium_are_one_line() -> None:
    found = lines(
        *batches(1, Stored((1,)), Stored((2, 3)), Stored((4,), tier=Tier.HOST), Removed((1,)), Removed((2,))),
        *batches(6, Cleared(), Cleared()),
    )
    assert spans(found) == [
        (1, 2, "stored", "gpu", 3),
        (3, 3, "stored", "host", 1),
        (4, 5, "removed", "gpu", 2),
        (6, 7, "cleared", "gpu", 0),
    ]
    assert [text(line, "t").split(maxsplit=4)[4] for line in found] == [
        "1-2 stored gpu 3 blocks from 1",
        "3 stored host 1 blocks from 4",
        "4-5 removed gpu 2 blocks from 1",
        "6-7 cleared gpu",
    ]


def test_a_hole_or_another_epoch_begins_another_line() -> None:
    found = lines(*batches(1, Stored((1,))), *batches(3, Stored((2,))), *batches(4, Stored((3,)), epoch=1))
    assert spans(found) == [(at, at, "stored", "gpu", 1) for at in (1, 3, 4)]


@pytest.mark.parametrize("data", [b"", b"garbage", bytes(60), b"\xff" * 1000])
def test_a_message_that_cannot_be_read_is_one_line_that_says_why(data: bytes) -> None:
    made = [
        *event_lines(SUBJECT, data, time_ns=5, stream_seq=9),
        fleet_line("kv.v1.fleet.m.w0", data, time_ns=5, stream_seq=9),
        beat_line(SUBJECT, data, time_ns=5),
    ]
    assert len(made) == 3
    for line in made:
        assert f"unreadable, {len(data)} bytes: malformed at byte" in text(line, "t")
        assert json.loads(msgspec.json.encode(line))["line"] == "unreadable"


def test_a_subject_that_names_no_rank_is_unreadable() -> None:
    (line,) = event_lines("kv.v1.events.m.W!.0", codec.encode_message(batches(1, Cleared())), time_ns=0, stream_seq=1)
    assert "allowed kv.v1.<kind>.<model>.<worker>.<rank>" in text(line, "t")


def test_workers_that_come_and_leave_are_reported() -> None:
    came = registered("w7", model="m", dp_ranks=(0, 1))
    told = [
        fleet_line("kv.v1.fleet.m.w7", fleet.encode(event), time_ns=5, stream_seq=9)
        for event in (
            came,
            WorkerDraining(worker_id="w7", instance="i"),
            WorkerLeft(worker_id="w7", instance="i", reason="asked to"),
        )
    ]
    assert [line.kind for line in told if isinstance(line, FleetLine)] == ["registered", "draining", "left"]
    assert text(told[0], "t").startswith(f"t fleet 9 w7 registered (instance {came.instance}): m at {came.base_url}")
    assert text(told[1], "t") == "t fleet 9 w7 draining (instance i)"
    assert text(told[2], "t") == "t fleet 9 w7 left (instance i): asked to"


def test_a_pulse_tells_the_place_and_how_much_is_held() -> None:
    beat = Heartbeat(instance="i", epoch=EPOCH, last_seq=4, tiers=(TierDigest(Tier.HOST, 3, 1),), stale="why")
    line = beat_line(SUBJECT, fleet.encode(beat), time_ns=5)
    assert isinstance(line, BeatLine)
    assert text(line, "t") == "t heartbeat w0/3 12345678 at 4, blocks: 3 host, stale: why"
