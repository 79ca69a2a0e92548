"""The event log's client on a real nats-server: order, once each, and what it does when the server is away."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from structlog.testing import capture_logs

from kv_runtime.event_log import (
    BrokerUnavailable,
    EventLog,
    LastSequenceDiffers,
    LogMessage,
    StoppedUnconnected,
    reading,
)
from kv_runtime.event_log import connection as connection_module
from kv_runtime.nats_server import find_binary
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import STREAM, Reader, connected, numbers, publish_all, publish_at_last, reader_of

SECRET = "s3cret"


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1", "nats://unknown.invalid:4222", "nats://[::1", "", "nats://h:x"])
async def test_no_server_is_an_error_that_names_the_address(url: str) -> None:
    with pytest.raises(BrokerUnavailable) as raised:
        await EventLog.connect(url, name="test")
    assert str(raised.value).startswith(f"nats.url {url}: ")


async def test_a_server_that_is_not_there_yet_is_waited_for(broker: Broker) -> None:
    await broker.kill()
    with capture_logs() as logs:
        connecting = asyncio.create_task(EventLog.connect(broker.url, name="test", awaited_until=asyncio.Event()))
        await eventually(lambda: any(each["event"] == "log_awaited" for each in logs))
        await broker.start()
        log = await connecting
    assert [each["url"] for each in logs if each["event"] == "log_awaited"] == [broker.url]
    assert log.is_connected
    await log.close()


async def test_who_waits_for_a_server_stops_when_asked() -> None:
    stop = asyncio.Event()
    connecting = asyncio.create_task(EventLog.connect("nats://127.0.0.1:1", name="test", awaited_until=stop))
    await asyncio.sleep(0)
    stop.set()
    with pytest.raises(StoppedUnconnected):
        await connecting


async def test_following_a_stream_that_is_not_there_is_an_error_that_names_it(log: EventLog) -> None:
    with pytest.raises(BrokerUnavailable, match=r"^stream TEST: "):
        await log.follow("TEST", "test.>", Reader().on_message)


async def test_a_slow_reader_misses_nothing_and_is_told_one_at_a_time(log: EventLog) -> None:
    told: list[bytes] = []
    inside = 0

    async def slow(message: LogMessage) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0.0005)
        told.append(message.data)
        inside -= 1

    await log.ensure_stream(STREAM._replace(max_bytes=1 << 28))
    await publish_all(log, numbers(1, 500))
    await log.follow("TEST", "test.>", slow)
    await eventually(lambda: len(told) >= 500)
    assert told == numbers(1, 500)


async def test_an_announcement_reaches_subscribers_with_its_reply_subject(log: EventLog) -> None:
    reader = Reader()
    await log.announce("core.a", b"before any subscriber")
    await log.listen("core.>", reader.on_message)
    await log.announce("core.a", b"hello", "core.answer")
    await log.announce("core.b", b"bye")
    await reader.until([b"hello", b"bye"])
    assert [(message.subject, message.reply, message.stream_seq) for message in reader.messages] == [
        ("core.a", "core.answer", 0),
        ("core.b", "", 0),
    ]


async def test_a_server_that_died_and_came_back_with_its_store_costs_nothing(broker: Broker, log: EventLog) -> None:
    reader, heard = await reader_of(log, numbers(1, 20)), Reader()
    await log.listen("core.a", heard.on_message)
    await broker.kill()
    await eventually(lambda: not log.is_connected)
    await broker.start()
    await eventually(lambda: log.is_connected)
    await publish_all(log, numbers(21, 40))
    await reader.until(numbers(1, 40))
    await log.announce("core.a", b"again")
    await heard.until([b"again"])
    assert [message.stream_seq for message in reader.messages] == list(range(1, 41))


async def test_nothing_is_published_or_announced_while_the_server_is_away_and_that_is_known_at_once(
    broker: Broker,
    log: EventLog,
) -> None:
    heard = Reader()
    await log.ensure_stream(STREAM)
    await log.listen("core.a", heard.on_message)
    await broker.kill()
    await eventually(lambda: not log.is_connected)
    async with asyncio.timeout(0.5):
        with pytest.raises(BrokerUnavailable, match=r"^publish test\.a: not connected$"):
            await log.publish("test.a", b"away")
        with pytest.raises(BrokerUnavailable, match=r"^announce core\.a: not connected$"):
            await log.announce("core.a", b"away")
    await broker.start()
    await eventually(lambda: log.is_connected)
    assert await log.publish("test.a", b"back") == 1
    await log.announce("core.a", b"back")
    await heard.until([b"back"])


@pytest.mark.parametrize("before", [3, 30])
async def test_streams_that_the_server_lost_are_made_again_and_followed_from_their_beginning(
    broker: Broker, log: EventLog, before: int
) -> None:
    reader = await reader_of(log, numbers(1, before))
    await broker.kill()
    broker.lose_store()
    await broker.start()
    await eventually(lambda: log.is_connected)
    await publish_at_last(log, b"101")
    await publish_all(log, numbers(102, 110))
    await reader.until(numbers(1, before) + numbers(101, 110))


async def test_a_frozen_server_is_lost_before_the_workers_are_and_found_when_it_thaws(broker: Broker) -> None:
    async with connected(broker.url, confirm_s=1.0) as log:
        reader = await reader_of(log, numbers(1, 3))
        broker.freeze()
        try:
            async with asyncio.TaskGroup() as group:
                unconfirmed = group.create_task(error_of(log.publish("test.a", b"4", "four")))
                await eventually(lambda: not log.is_connected, "lost", timeout_s=4.9)
        finally:
            broker.thaw()
        assert str(unconfirmed.result()).startswith("publish test.a: ")
        await eventually(lambda: log.is_connected)
        assert await log.publish("test.a", b"4", "four") == 4
        await publish_all(log, numbers(5, 6))
        await reader.until(numbers(1, 6))


async def error_of(work: Coroutine[Any, Any, object]) -> BrokerUnavailable:
    with pytest.raises(BrokerUnavailable) as raised:
        await work
    return raised.value


@pytest.mark.parametrize("made_again", [False, True])
async def test_a_reading_that_the_server_ended_goes_on(
    client: Client, log: EventLog, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    monkeypatch.setattr(reading, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(reading, "SILENCE_S", 0.5)
    reader = await reader_of(log, numbers(1, 5))
    manager = client.jsm()
    if made_again:
        await manager.delete_stream("TEST")
        await log.ensure_stream(STREAM)
    else:
        (consumer,) = await manager.consumers_info("TEST")
        await manager.delete_consumer("TEST", consumer.name)
    await publish_all(log, numbers(6, 15))
    await reader.until(numbers(1, 15))
    assert log.statistics().reconnects_total == 0


@pytest.mark.parametrize("followed", [False, True])
async def test_an_error_of_a_subscriber_is_not_swallowed(broker: Broker, followed: bool) -> None:
    async def fail(message: LogMessage) -> None:
        raise KeyError(message.data)

    log = await EventLog.connect(broker.url, name="test")
    await log.ensure_stream(STREAM)
    if followed:
        await log.follow("TEST", "test.>", fail)
        await log.publish("test.a", b"x")
    else:
        await log.listen("core.a", fail)
        await log.announce("core.a", b"x")
    with pytest.raises(KeyError, match="x") as raised:
        await log.run(asyncio.Event())
    assert raised.value.__notes__ == [f"taking a message of {'test.a' if followed else 'core.a'}"]
    await log.close()


class RecordingServer:
    """A server that knows the beginning of NATS' protocol and records commands in the order of their arrival."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            self.commands.append(line.split(b" ", 1)[0].strip())
            if self.commands[-1] == b"PING":
                writer.write(b"PONG\r\n")
        writer.close()


async def test_a_listener_is_subscribed_when_listen_returns() -> None:
    recording = RecordingServer()
    server = await asyncio.start_server(recording.serve, "127.0.0.1", 0)
    async with server:
        log = await EventLog.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", name="test")
        await log.listen("core.a", Reader().on_message)
        received = list(recording.commands)
        await log.close()
    assert received[-2:] == [b"SUB", b"PING"]


@asynccontextmanager
async def own_server(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A nats-server with these arguments, and its address."""
    process = await asyncio.create_subprocess_exec(find_binary(), *arguments, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        said = await process.stderr.readuntil(b"Server is ready\n")
        (port,) = re.findall(rb"client connections on \S+:(\d+)", said)
        yield process, f"127.0.0.1:{int(port)}"
    finally:
        process.terminate()
        await process.communicate()


async def test_a_server_that_wants_a_token_refuses_others_and_no_secret_is_shown() -> None:
    async with own_server("-a", "127.0.0.1", "-p", "-1", "--auth", SECRET) as (_, host):
        log = await EventLog.connect(f"nats://{host}", name="test", token=SECRET)
        await log.close()
        with pytest.raises(BrokerUnavailable) as raised:
            await EventLog.connect(f"nats://wr0ng@{host}", name="test")
        words = "the server refused the credentials, which are nats.user and nats.credentials"
        assert str(raised.value) == f"nats.url nats://**********@{host}: {words}"
        with pytest.raises(BrokerUnavailable, match="refused the credentials") as raised:
            await EventLog.connect(f"nats://{host}", name="test", user="router", token="wr0ng")
        assert "wr0ng" not in str(raised.value)


async def test_a_server_that_ends_the_connection_as_its_rules_changed_is_found_when_it_accepts_us_again(
    tmp_path: Path,
) -> None:
    def rule(token: str) -> None:
        lines = "listen: 127.0.0.1:-1", f"authorization {{ token: {token} }}", f"jetstream {{ store_dir: {tmp_path} }}"
        file.write_text("\n".join(lines))

    file = tmp_path / "nats.conf"
    rule(SECRET)
    stop = asyncio.Event()
    async with own_server("-c", str(file)) as (server, host):
        log = await EventLog.connect(f"nats://{host}", name="test", token=SECRET)
        running = asyncio.ensure_future(log.run(stop))
        with capture_logs() as logs:
            rule("an0ther")
            server.send_signal(signal.SIGHUP)
            await eventually(lambda: not log.is_connected)
            rule(SECRET)
            server.send_signal(signal.SIGHUP)
            await eventually(lambda: log.statistics().reconnects_total == 1)
        assert not running.done()
        assert log.is_connected
        (said,) = (each for each in logs if each["event"] == "log_lost")
        assert said["reason"] == "authorization violation"
        stop.set()
        await running
        await log.close()


@pytest.mark.parametrize("bound", ["LISTEN_MESSAGES_MAX", "LISTEN_BYTES_MAX"])
async def test_announced_messages_that_come_faster_than_they_are_taken_are_dropped_counted_and_logged_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(connection_module, bound, 10)
    taken, may_go_on = list[bytes](), asyncio.Event()

    async def take(message: LogMessage) -> None:
        await may_go_on.wait()
        taken.append(message.data)

    async with connected(broker.url) as log, connected(broker.url) as other:
        await log.listen("core.a", take)
        with capture_logs() as logs:
            for at in range(100):
                await other.announce("core.a", str(at).encode())
            await eventually(lambda: log.statistics().dropped_total >= 85)
        may_go_on.set()
        await eventually(lambda: len(taken) + log.statistics().dropped_total == 100)
    assert taken[0] == b"0"
    assert [line["event"] for line in logs] == ["log_messages_dropped"]


# ------------------------------------------------------------------------------------------------- conditions, headers
async def test_a_message_is_stored_only_behind_the_place_that_its_subject_must_have(log: EventLog) -> None:
    await log.ensure_stream(STREAM)
    assert await log.publish("test.a", b"1", after_seq=0) == 1
    await log.publish("test.b", b"2")
    with pytest.raises(LastSequenceDiffers, match=r"test\.a"):
        await log.publish("test.a", b"x", after_seq=0)
    with pytest.raises(LastSequenceDiffers):
        await log.publish("test.a", b"x", after_seq=2)
    assert await log.publish("test.a", b"3", after_seq=1) == 3
    assert (await log.stream_state("TEST")).last_seq == 3


async def test_a_stream_that_was_deleted_under_a_connection_is_made_again_and_followed(
    client: Client, log: EventLog
) -> None:
    reader = await reader_of(log, numbers(1, 1))
    await client.jetstream().delete_stream("TEST")
    await publish_at_last(log, b"2")
    await eventually(lambda: b"2" in reader.data)


async def test_refused_credentials_are_named_though_the_next_connection_is_reset() -> None:
    refused = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refused
        if not refused:
            refused = True
            writer.write(b'INFO {"max_payload": 1048576, "auth_required": true}\r\n')
            await reader.readline()
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            await writer.drain()
            writer.close()
            return
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerUnavailable, match="the server refused the credentials"):
            await EventLog.connect(f"nats://127.0.0.1:{port}", name="test", token="wr0ng")
