"""The journal's writer: everything in its order, what does not fit is counted, and no caller waits for the log."""

import asyncio
import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_protocol import subjects
from kv_protocol.journal import (
    MESSAGE_BYTES_MAX,
    RECORD_PARTS_MAX,
    CheckpointBegan,
    CheckpointEnded,
    CheckpointPart,
    JournalBegan,
    JournalMessage,
    JournalRecord,
    Lost,
    PolicyChanged,
    TimePassed,
    decode_journal,
    encode_record,
)
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable
from router.decision.state import RouterState, StateSettings
from router.journal.encoder import LOSS_REASONS, JournalCheckpoint, JournalEncoder, LossReason
from router.journal.log import CHECKPOINT_S, JournalSection, JournalWriter, router_name
from tests.support.manual_clock import ManualClock
from tests.support.replayed import continuous
from tests.unit.router.samples import TEXT

RECORD_BYTES = len(encode_record(TimePassed(now_s=0.0)))
STATE = StateSettings(text=TEXT)


class FakeLog:
    """A log that takes what is published while it is there; told by `tests/system/integration/test_journal.py`."""

    def __init__(self) -> None:
        self.is_connected = True
        self.fails = 0
        self.published: list[tuple[str, bytes, str]] = []
        self._grown = asyncio.Event()

    async def publish(self, subject: str, data: bytes, message_id: str = "") -> int:
        await asyncio.sleep(0)
        if not self.is_connected or self.fails:
            self.fails = max(0, self.fails - 1)
            raise BrokerUnavailable("publish: not confirmed")
        self.published.append((subject, data, message_id))
        self._grown.set()
        return len(self.published)

    @property
    def messages(self) -> list[JournalMessage]:
        return [decode_journal(data) for _, data, _ in self.published]

    @property
    def records(self) -> list[JournalRecord]:
        return list(continuous(self.messages))

    async def has(self, count: int) -> None:
        """Return once there are so many records."""
        await self._until(lambda: sum(len(message.records) for message in self.messages) >= count)

    async def has_kind(self, kind: type[Any], count: int = 1) -> None:
        """Return once there are so many records of a kind."""
        await self._until(lambda: sum(isinstance(record, kind) for record in self.records) >= count)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._grown.clear()
            await self._grown.wait()


class Bench:
    """A writer on a fake log."""

    def __init__(self, clock: Clock | None = None, **bounds: int) -> None:
        self.log = FakeLog()
        self.state = RouterState(STATE)
        self.stop = asyncio.Event()
        log: Any = self.log
        self.writer = JournalWriter(
            log,
            clock or Clock(),
            JournalSection(),
            router="router-1",
            made_of=STATE,
            state=self.state,
            kv_seq=lambda: 7,
            **bounds,
        )
        self._running = asyncio.ensure_future(self.writer.run(self.stop))

    def record(self, *moments: int) -> None:
        for moment in moments:
            self.writer.encoder.record(TimePassed(now_s=float(moment)))

    async def end(self) -> None:
        self.stop.set()
        await self._running


def moments(records: list[JournalRecord]) -> list[int]:
    return [int(record.now_s) for record in records if isinstance(record, TimePassed)]


async def test_a_life_begins_with_what_its_state_is_made_of_and_goes_on_in_order() -> None:
    bench = Bench()
    bench.record(*range(40))
    await bench.log.has(41)
    await bench.end()
    began, *rest = bench.log.records
    assert isinstance(began, JournalBegan)
    assert (began.router, began.settings["text"]["tokenizer"]) == ("router-1", TEXT.tokenizer)
    assert moments(rest) == list(range(40))
    assert {subject for subject, _, _ in bench.log.published} == {subjects.journal("router-1")}
    writer = bench.writer
    assert (writer.records_total, sum(writer.lost().values()), writer.waiting()) == (41, 0, 0)
    assert writer.bytes_total == sum(len(data) for _, data, _ in bench.log.published)


async def test_while_the_log_is_away_records_wait_and_the_oldest_give_way_and_are_counted() -> None:
    bench = Bench(buffer_bytes_max=64 * RECORD_BYTES)
    await bench.log.has(1)
    bench.log.is_connected = False
    bench.record(*range(100))
    assert bench.writer.waiting() == 100 - sum(bench.writer.lost().values())
    bench.log.is_connected = True
    await bench.end()
    lost = sum(bench.writer.lost().values())
    assert 0 < lost <= 100 - 48
    assert moments(bench.log.records) == list(range(lost, 100))
    assert [record.count for record in bench.log.records if isinstance(record, Lost)] == [lost]
    assert [message.first for message in bench.log.messages][1] == 2


async def test_a_message_that_was_not_confirmed_is_published_again_with_the_same_id_and_the_same_records() -> None:
    bench = Bench()
    bench.log.fails = 2
    bench.record(1, 2)
    async with asyncio.timeout(5):
        while not bench.writer.problem():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
    assert bench.writer.problem().startswith("the journal is not written: 3 records wait")
    await bench.log.has(3)
    assert bench.writer.problem() == ""
    bench.record(3)
    await bench.end()
    assert moments(bench.log.records) == [1, 2, 3]
    assert bench.writer.failures_total == 2
    ids = [message_id for _, _, message_id in bench.log.published]
    assert ids[0] == f"router-1/{bench.log.messages[0].life}/1"
    assert len(set(ids)) == len(ids)


async def test_records_that_a_disconnected_log_does_not_take_at_the_end_are_lost_without_waiting() -> None:
    bench = Bench()
    await bench.log.has(1)
    bench.log.is_connected = False
    bench.record(1, 2)
    await bench.end()
    assert sum(bench.writer.lost().values()) == 2


async def test_no_message_is_larger_than_messages_may_be_and_a_record_that_is_goes_in_parts() -> None:
    bench, draw = Bench(), random.Random(1)
    told = [
        PolicyChanged(now_s=float(size), policy={"mode": draw.randbytes(size // 2).hex()})
        for size in (300_000, 300_000, MESSAGE_BYTES_MAX, 5 * MESSAGE_BYTES_MAX, 10)
    ]
    for record in told:
        bench.writer.encoder.record(record)
    await bench.end()
    assert all(len(data) <= MESSAGE_BYTES_MAX for _, data, _ in bench.log.published)
    assert bench.log.records[1:] == told
    assert sum(bench.writer.lost().values()) == 0


# ------------------------------------------------------------------------------------------- losses and checkpoints


def kinds(records: list[JournalRecord]) -> list[type[Any]]:
    """Return the kinds of records, each once where several follow each other."""
    return [kind for kind, _ in groupby(map(type, records))]


CHECKPOINT = [CheckpointBegan, CheckpointPart, CheckpointEnded]


@pytest.mark.parametrize(
    ("unwritable", "reason"),
    [
        (PolicyChanged(now_s=0.0, policy={"mode": "x" * (RECORD_PARTS_MAX * MESSAGE_BYTES_MAX)}), "too_large"),
        (PolicyChanged(now_s=0.0, policy={"mode": 1 << 64}), "not_encodable"),
    ],
    ids=["too_large", "not_encodable"],
)
async def test_a_record_that_cannot_be_written_is_counted_said_once_and_followed_by_a_checkpoint(
    unwritable: JournalRecord, reason: LossReason
) -> None:
    bench = Bench()
    with capture_logs() as lines:
        bench.record(1)
        bench.writer.encoder.record(unwritable)
        bench.writer.encoder.record(unwritable)
        bench.record(2)
        await bench.log.has_kind(CheckpointEnded)
        bench.record(3)
        await bench.end()
    assert kinds(bench.log.records) == [JournalBegan, TimePassed, Lost, TimePassed, *CHECKPOINT, TimePassed]
    assert bench.writer.lost() == dict.fromkeys(LOSS_REASONS, 0) | {reason: 2}
    said = [line for line in lines if line["event"] == "journal_records_lost"]
    assert [(line["records"], line["reasons"]) for line in said] == [(2, {reason: 2})]


async def test_behind_a_full_buffer_follows_a_checkpoint_and_the_log_says_when_it_began_and_how_many_were_lost() -> (
    None
):
    bench = Bench(buffer_bytes_max=64 * RECORD_BYTES)
    with capture_logs() as lines:
        await bench.log.has(1)
        bench.log.is_connected = False
        bench.record(*range(100))
        assert [line["event"] for line in lines] == ["journal_buffer_full"]
        bench.log.is_connected = True
        await bench.log.has_kind(CheckpointEnded)
        await bench.end()
    assert kinds(bench.log.records) == [JournalBegan, Lost, TimePassed, *CHECKPOINT]
    lost = bench.writer.lost()["buffer_full"]
    said = [line for line in lines if line["event"] == "journal_records_lost"]
    assert [(line["records"], line["reasons"]) for line in said] == [(lost, {"buffer_full": lost})]


@pytest.mark.parametrize("left", [0, 1], ids=["replaced", "lost its end"])
async def test_a_checkpoint_follows_at_once_when_the_stream_does_not_have_the_journal_any_more(left: int) -> None:
    bench = Bench()
    for moment in range(3):
        bench.record(moment)
        await bench.log.has(2 + moment)
    del bench.log.published[left:]
    with capture_logs() as lines:
        bench.record(3)
        await bench.log.has_kind(CheckpointEnded)
        bench.record(4)
        await bench.end()
    assert [line["event"] for line in lines] == ["journal_begins_anew"]
    written = [record for message in bench.log.messages[left:] for record in message.records]
    assert kinds(written) == [TimePassed, *CHECKPOINT, TimePassed]


async def test_checkpoints_come_by_time_and_by_records_but_are_at_most_half_of_the_journal() -> None:
    clock = ManualClock()
    bench = Bench(clock, checkpoint_records=60)
    await bench.log.has(1)
    await clock.advance(CHECKPOINT_S - 1.0)
    bench.record(1)
    await bench.log.has(2)
    assert bench.writer.encoder.checkpoints_total == 0
    await clock.advance(1.0)
    bench.record(2)
    await bench.log.has_kind(CheckpointEnded)
    written = bench.writer.records_total
    few = bench.writer.encoder.checkpoint_bytes // len(encode_record(TimePassed(now_s=0.0))) - 1
    assert few > 60  # by their number another checkpoint were due
    bench.record(*range(few))
    await bench.log.has(written + few)
    assert bench.writer.encoder.checkpoints_total == 1
    bench.record(1, 2)
    await bench.log.has_kind(CheckpointEnded, 2)
    await bench.end()


async def test_many_records_go_out_in_few_messages() -> None:
    bench = Bench()
    bench.record(*range(5000))
    await bench.log.has(5001)
    await bench.end()
    assert len(bench.log.messages) <= 5001 / 16


async def test_its_figures_are_shown() -> None:
    bench = Bench()
    await bench.log.has(1)
    await bench.end()
    shown = {sample.name: sample.value for each in bench.writer.families() for sample in each.samples}
    assert shown["kvrouter_journal_records_total"] == 1.0
    assert (shown["kvrouter_journal_batches_total"], shown["kvrouter_journal_unpublished_records"]) == (1.0, 0.0)


def test_a_router_is_named_by_configuration_or_by_its_process() -> None:
    assert router_name(JournalSection(router="eu-1"), "0123456789ab") == "eu-1"
    assert router_name(JournalSection(), "0123456789ab") == "router-01234567"


UNENCODABLE = PolicyChanged(now_s=0.0, policy={"mode": 1 << 64})


def checkpoint() -> JournalCheckpoint:
    return JournalCheckpoint(RouterState(StateSettings(text=TEXT)), CheckpointBegan(now_s=0.0, router="r", settings={}))


def drained(encoder: JournalEncoder) -> list[JournalRecord]:
    messages = []
    while len(encoder) or encoder.is_in_checkpoint:
        messages.append(decode_journal(encoder.cut().data))
    return [record for message in messages for record in message.records]


def test_a_loss_behind_a_checkpoint_that_waits_wants_another_and_one_before_it_does_not() -> None:
    encoder = JournalEncoder(1)
    for what in (UNENCODABLE, checkpoint(), TimePassed(now_s=1.0)):
        encoder.record(what)
    drained(encoder)
    assert not encoder.broken_by
    for what in (TimePassed(now_s=1.0), checkpoint(), UNENCODABLE):
        encoder.record(what)
    assert [type(record) for record in drained(encoder)][-1] is Lost
    assert encoder.broken_by == {"not_encodable": 1}


def test_a_checkpoint_with_a_row_longer_than_any_record_ends_with_a_loss() -> None:
    encoder, told = JournalEncoder(1), checkpoint()
    long = CheckpointPart(now_s=0.0, table="fleet", rows=bytes(RECORD_PARTS_MAX * MESSAGE_BYTES_MAX))
    told.parts = lambda: iter([long])  # type: ignore[method-assign]
    encoder.record(told)
    assert [type(record) for record in drained(encoder)] == [CheckpointBegan, Lost]
    assert (encoder.lost, encoder.is_in_checkpoint) == ({"too_large": 1}, False)
