"""Publications whose confirmation comes later: in order, bounded, and each ends, whatever becomes of the server."""

import asyncio
import itertools

import pytest
from nats.aio.client import Client

from kv_runtime.event_log import WINDOW_MESSAGES, BrokerUnavailable, EventLog
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import STREAM, Reader, connected, numbers


async def send_all(log: EventLog, payloads: list[bytes]) -> list[asyncio.Future[int]]:
    """Hand all over, with their own words as ids."""
    return [await log.send("test.a", payload, payload.decode()) for payload in payloads]


async def outcomes(sent: list[asyncio.Future[int]]) -> list[int | str]:
    """Wait until each has ended; return its place, or the error's words."""
    ended = await asyncio.gather(*sent, return_exceptions=True)
    return [outcome if isinstance(outcome, int) else str(outcome) for outcome in ended]


async def test_a_publisher_waits_while_the_window_is_full(broker: Broker) -> None:
    async with connected(broker.url) as log, asyncio.TaskGroup() as group:
        await log.ensure_stream(STREAM)
        broker.freeze()
        try:
            await send_all(log, numbers(1, WINDOW_MESSAGES))
            waiting = group.create_task(log.send("test.a", b"last"))
            for _ in range(100):
                await asyncio.sleep(0)
            assert (waiting.done(), log.statistics().unconfirmed) == (False, WINDOW_MESSAGES)
        finally:
            broker.thaw()
        assert await (await waiting) == WINDOW_MESSAGES + 1


async def test_a_message_sent_again_has_its_first_place(log: EventLog) -> None:
    await log.ensure_stream(STREAM)
    sent = await send_all(log, [*numbers(1, 3), *numbers(2, 4)])
    assert await outcomes(sent) == [1, 2, 3, 2, 3, 4]


async def test_what_no_stream_takes_ends_with_the_reason(log: EventLog) -> None:
    sent = [await log.send("nowhere.a", b"x")]
    assert await outcomes(sent) == ["publish nowhere.a: no stream takes this subject"]
    assert log.statistics().publish_failures_total == 1


async def test_what_the_server_refuses_ends_with_its_reason(client: Client, log: EventLog) -> None:
    await client.jsm().add_stream(name="TEST", subjects=["test.>"], max_msg_size=10)
    sent = [await log.send("test.a", bytes(11)), await log.send("test.a", bytes(10))]
    assert await outcomes(sent) == ["publish test.a: message size exceeds maximum allowed (code 400, 10054)", 1]


async def test_what_is_too_large_for_the_server_is_refused_and_takes_no_room(log: EventLog) -> None:
    await log.ensure_stream(STREAM)
    for _ in range(WINDOW_MESSAGES + 1):
        with pytest.raises(BrokerUnavailable, match=r"^publish test\.a: "):
            await log.send("test.a", bytes(2 << 20))
    await eventually(lambda: log.statistics().unconfirmed == 0)


async def test_a_lost_connection_ends_all_that_is_unconfirmed_and_a_repetition_is_not_twice_there(
    broker: Broker,
    log: EventLog,
) -> None:
    reader = Reader()
    await log.ensure_stream(STREAM)
    assert await outcomes(await send_all(log, numbers(1, 5))) == [1, 2, 3, 4, 5]
    broker.freeze()
    sent = await send_all(log, numbers(4, 200))
    await broker.kill()
    assert set(await outcomes(sent)) == {"publish test.a: the connection was lost"}
    assert log.statistics().unconfirmed == 0
    assert log.statistics().publish_failures_total == 197
    with pytest.raises(BrokerUnavailable, match=r"^publish test\.a: not connected$"):
        await log.send("test.a", b"away")
    await broker.start()
    await eventually(lambda: log.is_connected)
    assert await outcomes(await send_all(log, numbers(4, 200))) == list(range(4, 201))
    await log.follow("TEST", "test.>", reader.on_message)
    await reader.until(numbers(1, 200))
    assert log.statistics().reconnects_total == 1


async def test_what_is_not_confirmed_in_time_ends(broker: Broker) -> None:
    async with connected(broker.url, confirm_s=0.2) as log:
        await log.ensure_stream(STREAM)
        broker.freeze()
        try:
            sent = await send_all(log, numbers(1, 3))
            assert set(await outcomes(sent)) == {"publish test.a: not confirmed within 0.2 s"}
            assert log.statistics().unconfirmed == 0
        finally:
            broker.thaw()
        assert await outcomes(await send_all(log, numbers(3, 4))) == [3, 4]


async def test_a_cancelled_publisher_takes_no_place_in_the_window(log: EventLog) -> None:
    await log.ensure_stream(STREAM)
    for sent in await send_all(log, numbers(1, 3)):
        sent.cancel()
    assert await log.publish("test.a", b"next") == 4
    assert (log.statistics().unconfirmed, log.statistics().publish_failures_total) == (0, 0)


async def test_concurrent_publishers_each_keep_their_order(log: EventLog) -> None:
    reader, counts = Reader(), itertools.repeat(100, 5)
    await log.ensure_stream(STREAM)

    async def send(letter: str, count: int) -> None:
        await outcomes(await send_all(log, [f"{letter}{number:03}".encode() for number in range(count)]))

    await asyncio.gather(*(send(letter, count) for letter, count in zip("abcde", counts, strict=False)))
    await log.follow("TEST", "test.>", reader.on_message)
    await eventually(lambda: len(reader.data) == 500)
    for letter in b"abcde":
        of_one = [data for data in reader.data if data[0] == letter]
        assert of_one == sorted(of_one)
