"""Messages of a stream by place and by time, on a real nats-server."""

import msgspec
import pytest

from kv_runtime.event_log import BrokerUnavailable, EventLog
from tests.unit.kv_runtime.log_client import STREAM, Reader, numbers, publish_all


class Answer(msgspec.Struct):
    error: None = None


class OtherAnswer(msgspec.Struct):
    no_such_key: int


async def filled(log: EventLog, count: int) -> list[int]:
    """Return the times of `count` messages."""
    reader = Reader()
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, count))
    reading = await log.follow("TEST", "test.>", reader.on_message)
    await reader.until(numbers(1, count))
    await log.leave(reading)
    return [message.time_ns for message in reader.messages]


async def test_a_message_is_found_by_its_place_or_as_the_first_behind_it(log: EventLog) -> None:
    times = await filled(log, 9)
    await log.purge("TEST", 3)
    found = [await log.message_from("TEST", seq) for seq in (0, 1, 4, 9)]
    assert [(each.stream_seq, each.data, each.time_ns) for each in found if each is not None] == [
        (4, b"4", times[3]),
        (4, b"4", times[3]),
        (4, b"4", times[3]),
        (9, b"9", times[8]),
    ]
    assert await log.message_from("TEST", 10) is None


async def test_a_place_is_found_by_its_time(log: EventLog) -> None:
    times = await filled(log, 30)
    assert [await log.seq_at("TEST", time) for time in times] == list(range(1, 31))
    assert [await log.seq_at("TEST", time - 1) for time in times] == list(range(30))
    assert await log.seq_at("TEST", times[-1] + 10**12) == 30
    await log.purge("TEST", 10)
    assert [await log.seq_at("TEST", times[at]) for at in (0, 9, 10, 29)] == [10, 10, 11, 30]


async def test_a_stream_that_is_not_there_is_named(log: EventLog) -> None:
    with pytest.raises(BrokerUnavailable, match=r"message 1 of TEST.*stream not found"):
        await log.message_from("TEST", 1)
    with pytest.raises(BrokerUnavailable, match=r"messages of TEST by time.*stream not found"):
        await log.seq_at("TEST", 1)


async def test_a_closed_reader_of_a_stream_gets_no_more_messages(log: EventLog) -> None:
    left, other = Reader(), Reader()
    await log.ensure_stream(STREAM)
    reading = await log.follow("TEST", "test.>", left.on_message)
    await log.follow("TEST", "test.>", other.on_message)
    await publish_all(log, numbers(1, 2))
    await left.until(numbers(1, 2))
    await log.leave(reading)
    await publish_all(log, numbers(3, 4))
    await other.until(numbers(1, 4))
    assert left.data == numbers(1, 2)


async def test_a_message_of_one_subject_is_found_with_what_its_publisher_set_beside_it(log: EventLog) -> None:
    await log.ensure_stream(STREAM)
    await log.publish("test.a.x", b"1")
    await log.publish("test.b.x", b"2", headers={"Kv-One": "a: b", "Kv-Two": "c"})
    found = await log.message_from("TEST", 1, "test.*.x")
    assert found is not None
    assert (found.stream_seq, found.headers) == (1, None)
    found = await log.message_from("TEST", 2, "test.*.x")
    assert found is not None
    assert (found.subject, found.data, found.headers) == ("test.b.x", b"2", {"Kv-One": "a: b", "Kv-Two": "c"})
    assert await log.message_from("TEST", 2, "test.a.*") is None


async def test_an_api_request_about_a_stream_that_is_not_there_has_no_answer(log: EventLog) -> None:
    assert await log.answer_of("INFO", Answer) == Answer()
    assert await log.answer_of("STREAM.INFO.TEST", Answer) is None
    with pytest.raises(BrokerUnavailable, match=r"JetStream STREAM\.CREATE\.TEST: .*code=400"):
        await log.answer_of("STREAM.CREATE.TEST", Answer, b"{")
    with pytest.raises(BrokerUnavailable, match=r"JetStream INFO: an answer that cannot be read"):
        await log.answer_of("INFO", OtherAnswer)
