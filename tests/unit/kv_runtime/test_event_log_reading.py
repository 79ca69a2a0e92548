"""Reading on from a place, where the stream is the same and where it is not; messages by place and by time."""

import asyncio

import msgspec
import pytest
from nats.aio.client import Client

from kv_runtime.event_log import BrokerUnavailable, EventLog, Reading, reading
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import STREAM, Reader, connected, numbers, publish_all


async def followed(log: EventLog, reader: Reader, *, after_seq: int, created: str) -> Reading:
    return await log.follow("TEST", "test.>", reader.on_message, after_seq=after_seq, created=created)


@pytest.mark.parametrize("after_seq", [0, 1, 5, 9])
async def test_the_stream_of_that_birth_is_read_behind_the_place(log: EventLog, after_seq: int) -> None:
    reader = Reader()
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, 9))
    born = (await log.stream_state("TEST")).created
    place = await followed(log, reader, after_seq=after_seq, created=born)
    assert (place.created, place.unread) == (born, 9 - after_seq)
    await publish_all(log, numbers(10, 12))
    await reader.until(numbers(after_seq + 1, 12))
    await eventually(lambda: (place.delivered_seq, place.delivered_total, place.unread) == (12, 12 - after_seq, 0))
    assert place.read_anew_total == 0


@pytest.mark.parametrize(("after_seq", "same"), [(5, False), (10, True), (10**6, True)])
async def test_another_stream_or_a_shorter_one_is_read_from_its_beginning(
    log: EventLog, after_seq: int, same: bool
) -> None:
    reader = Reader()
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, 9))
    born = (await log.stream_state("TEST")).created
    place = await followed(log, reader, after_seq=after_seq, created=born if same else "2001-02-03T04:05:06Z")
    await reader.until(numbers(1, 9))
    assert (place.created, place.read_anew_total) == (born, 1)
    assert log.statistics().read_anew_total == 1


async def test_what_is_gone_before_it_was_read_is_not_unread_any_more(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "HEARTBEAT_S", 0.2)
    reader = Reader()
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, 3))
    place = await followed(log, reader, after_seq=0, created="")
    await reader.until(numbers(1, 3))
    place.unread = 7  # as if the server had removed so many that it had not sent yet
    await eventually(lambda: place.unread == 0)


async def _made_anew(log: EventLog) -> None:
    """Make the stream; the server refuses it (500, 10049) while it still removes the files of the deleted one."""
    while True:
        try:
            await log.ensure_stream(STREAM)
        except BrokerUnavailable as error:
            if "error creating store" not in str(error):
                raise
            await asyncio.sleep(0)
        else:
            return


async def test_a_stream_made_anew_is_counted_and_has_another_birth(client: Client, log: EventLog) -> None:
    reader = Reader()
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, 5))
    place = await followed(log, reader, after_seq=0, created="")
    await reader.until(numbers(1, 5))
    born = place.created
    await client.jsm().delete_stream("TEST")
    await _made_anew(log)
    await publish_all(log, numbers(6, 7))
    await reader.until(numbers(1, 7))
    await eventually(lambda: place.delivered_seq == 2)
    assert place.read_anew_total == 1
    assert place.created == (await log.stream_state("TEST")).created != born


async def test_a_server_of_several_is_found(broker: Broker) -> None:
    async with connected(f"nats://127.0.0.1:1,{broker.url}") as log:
        await log.ensure_stream(STREAM)
        assert await log.publish("test.a", b"x") == 1


async def test_no_server_of_several_is_an_error_that_names_them_without_secrets() -> None:
    with pytest.raises(
        BrokerUnavailable, match=r"^nats\.url nats://\*{10}@127\.0\.0\.1:1,nats://\*{10}@127\.0\.0\.1:2: "
    ):
        await EventLog.connect("nats://secret@127.0.0.1:1,nats://secret@127.0.0.1:2", name="test")


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
    with pytest.raises(BrokerUnavailable, match=r"stream TEST.*stream not found"):
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
        await log.answer_of("STREAM.CREATE.TEST", Answer)
    with pytest.raises(BrokerUnavailable, match=r"JetStream INFO: an answer that cannot be read"):
        await log.answer_of("INFO", OtherAnswer)
