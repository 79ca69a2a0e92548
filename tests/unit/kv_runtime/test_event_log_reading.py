"""Reading on from a place: behind it where the stream is the same, from its beginning where it is not."""

import asyncio

import nats
import pytest

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


async def test_a_stream_made_anew_is_counted_and_has_another_birth(broker: Broker, log: EventLog) -> None:
    reader = Reader()
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, 5))
    place = await followed(log, reader, after_seq=0, created="")
    await reader.until(numbers(1, 5))
    born = place.created
    client = await nats.connect(broker.url)
    await client.jsm().delete_stream("TEST")
    await client.close()
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
