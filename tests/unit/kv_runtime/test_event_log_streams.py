"""Streams as they are wanted: made, taken over, kept up, or refused; objects in a bucket: whole, or not there."""

import asyncio
import base64
from functools import partial
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from kv_runtime.event_log import (
    BrokerUnavailable,
    EventLog,
    NoSuchObject,
    ObjectBucket,
    ObjectDamaged,
    StreamUnfit,
    bucket_spec,
)
from kv_runtime.event_log.objects import CHUNK_BYTES
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import STREAM, Reader, connected, numbers, publish_all, reader_of


async def test_a_stream_is_made_once_and_takes_other_limits(log: EventLog) -> None:
    await log.ensure_stream(STREAM)
    await log.ensure_stream(STREAM)
    await publish_all(log, numbers(1, 3))
    await log.ensure_stream(STREAM._replace(max_age_s=60, max_bytes=1 << 21, per_subject=2))
    await log.ensure_stream(STREAM._replace(subjects=("test.>", "other.>")))
    other = Reader()
    await log.follow("TEST", "test.>", other.on_message)
    await other.until(numbers(2, 3))


async def test_a_stream_that_cannot_be_is_an_error_that_names_it(log: EventLog) -> None:
    with pytest.raises(BrokerUnavailable, match=r"^stream TEST: "):
        await log.ensure_stream(STREAM._replace(max_bytes=1 << 50))
    await log.ensure_stream(STREAM)
    with pytest.raises(BrokerUnavailable, match=r"^stream TWIN: .*overlap"):
        await log.ensure_stream(STREAM._replace(name="TWIN"))


async def test_what_others_set_on_a_stream_stays(client: Client, log: EventLog) -> None:
    manager = client.jsm()
    await manager.add_stream(name="TEST", subjects=["test.>"], description="ours", max_msgs=7, max_bytes=1000)
    await log.ensure_stream(STREAM)
    config = (await manager.stream_info("TEST")).config
    assert (config.description, config.max_msgs, config.max_bytes) == ("ours", 7, STREAM.max_bytes)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"storage": StorageType.MEMORY}, "storage: found memory, allowed file"),
        ({"retention": RetentionPolicy.INTEREST}, "retention: found interest, allowed limits"),
        ({"discard": DiscardPolicy.NEW}, "discard: found new, allowed old"),
        ({"deny_purge": True}, "deny_purge: found True, allowed none"),
        ({"no_ack": True}, "no_ack: found True, allowed none"),
        ({"allow_rollup_hdrs": True}, "allow_rollup_hdrs: found True, allowed none"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
async def test_a_stream_that_cannot_be_ours_is_refused_with_the_field_and_stays(
    client: Client, log: EventLog, settings: dict[str, Any], error: str
) -> None:
    await client.jsm().add_stream(StreamConfig(name="TEST", subjects=["test.>"]), **settings)
    before = await client.jsm().stream_info("TEST")
    with pytest.raises(StreamUnfit) as raised:
        await log.ensure_stream(STREAM)
    assert str(raised.value) == f"stream TEST: {error}"
    assert (await client.jsm().stream_info("TEST")).config == before.config


async def test_a_sealed_stream_and_a_mirror_are_refused(client: Client, log: EventLog) -> None:
    manager = client.jsm()
    sealed = await manager.add_stream(name="TEST", subjects=["test.>"], storage="file")
    await manager.update_stream(sealed.config, sealed=True)
    await manager.add_stream(name="COPY", mirror={"name": "TEST"})
    with pytest.raises(StreamUnfit, match="sealed: found True, allowed none"):
        await log.ensure_stream(STREAM)
    with pytest.raises(StreamUnfit, match=r"mirror: found .*TEST.*, allowed none"):
        await log.ensure_stream(STREAM._replace(name="COPY", subjects=("copy.>",)))


async def test_replicas_that_the_server_cannot_have_are_an_error_with_its_reason(log: EventLog) -> None:
    with pytest.raises(BrokerUnavailable, match=r"^stream TEST: .*replicas"):
        await log.ensure_stream(STREAM._replace(replicas=3))


async def test_concurrent_calls_of_ensure_agree(broker: Broker) -> None:
    async with connected(broker.url) as one, connected(broker.url) as other:
        specs = [STREAM._replace(max_bytes=(1 << 20) + number) for number in range(10)]
        await asyncio.gather(*(log.ensure_stream(spec) for spec in specs for log in (one, other)))
        assert await one.publish("test.a", b"x") == 1


async def test_a_stream_that_became_unfit_while_the_server_was_away_is_said_and_followed(
    broker: Broker, log: EventLog
) -> None:
    reader = await reader_of(log)
    await broker.kill()
    broker.lose_store()
    await eventually(lambda: not log.is_connected)
    await broker.start()
    client = await nats.connect(broker.url)
    try:
        await client.jsm().add_stream(name="TEST", subjects=["test.>"], storage="memory")
    except nats.js.errors.BadRequestError:  # ours was quicker
        await client.jsm().delete_stream("TEST")
        await client.jsm().add_stream(name="TEST", subjects=["test.>"], storage="memory")
    await eventually(lambda: log.is_connected)
    await client.jetstream().publish("test.a", b"x")
    await reader.until([b"x"])
    await client.close()


async def test_the_birth_of_a_stream_outlives_the_server_and_no_other_stream_has_it(
    broker: Broker, log: EventLog
) -> None:
    await log.ensure_stream(STREAM)
    born = (await log.stream_state("TEST")).created
    await broker.kill()
    await eventually(lambda: not log.is_connected)
    with pytest.raises(BrokerUnavailable, match=r"^stream TEST: not connected$"):
        await log.stream_state("TEST")
    await broker.start()
    await eventually(lambda: log.is_connected)
    assert (await log.stream_state("TEST")).created == born
    client = await nats.connect(broker.url)
    await client.jsm().delete_stream("TEST")
    await client.close()
    await log.ensure_stream(STREAM)
    assert (await log.stream_state("TEST")).created != born


MAX_BYTES = 8 << 20


async def bucket_of(log: EventLog) -> ObjectBucket:
    await log.ensure_stream(bucket_spec("TEST", replicas=1, max_bytes=MAX_BYTES))
    return log.objects("TEST")


@pytest_asyncio.fixture
async def bucket(log: EventLog) -> ObjectBucket:
    return await bucket_of(log)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7])
async def test_what_was_put_is_got_also_by_other_clients(client: Client, bucket: ObjectBucket, size: int) -> None:
    data = bytes(at % 251 for at in range(size))
    await bucket.put("a", data)
    assert await bucket.get("a") == data
    theirs = await client.jetstream().object_store("TEST")
    assert (await theirs.get("a")).data == data
    await theirs.put("b", data)
    assert await bucket.get("b") == data
    assert await bucket.names() == ["a", "b"]


async def test_what_is_deleted_is_gone_and_takes_no_room(bucket: ObjectBucket) -> None:
    await bucket.put("a", bytes(CHUNK_BYTES * 3))
    await bucket.put("b", b"b")
    with_both = await bucket.size_bytes()
    await bucket.delete("a")
    await bucket.delete("a")
    assert await bucket.names() == ["b"]
    assert await bucket.size_bytes() < with_both - 3 * CHUNK_BYTES
    with pytest.raises(NoSuchObject, match="no object a"):
        await bucket.get("a")
    await bucket.delete("b")
    assert (await bucket.names(), await bucket.size_bytes()) == ([], 0)


async def test_what_others_deleted_is_not_there(client: Client, bucket: ObjectBucket) -> None:
    await bucket.put("a", b"a")
    await (await client.jetstream().object_store("TEST")).delete("a")
    with pytest.raises(NoSuchObject):
        await bucket.get("a")
    await bucket.delete("a")
    assert (await bucket.names(), await bucket.size_bytes()) == ([], 0)


@pytest.mark.parametrize("damage", ["gone", "other", "more", "description"])
async def test_what_is_not_what_was_put_is_refused(client: Client, bucket: ObjectBucket, damage: str) -> None:
    await bucket.put("a", bytes(CHUNK_BYTES * 2))
    context = client.jetstream()
    if damage == "description":
        await context.publish(f"$O.TEST.M.{base64.urlsafe_b64encode(b'a').decode()}", b"garbage")
    else:
        await client.jsm().delete_msg("OBJ_TEST", 1)
    if damage in ("other", "more"):
        subject = (await context.get_msg("OBJ_TEST", 2)).subject
        assert subject is not None
        await context.publish(subject, bytes([1]) * CHUNK_BYTES if damage == "other" else bytes(CHUNK_BYTES + 1))
    with pytest.raises(ObjectDamaged, match="object a: "):
        await bucket.get("a")


async def test_what_does_not_fit_is_refused_and_leaves_nothing(bucket: ObjectBucket) -> None:
    await bucket.put("a", bytes(6 << 20))
    full = await bucket.size_bytes()
    with pytest.raises(BrokerUnavailable, match=r"^bucket TEST: put b: .*maximum bytes exceeded"):
        await bucket.put("b", bytes(4 << 20))
    assert (await bucket.names(), await bucket.size_bytes()) == (["a"], full)
    assert await bucket.get("a") == bytes(6 << 20)


async def test_old_chunks_without_an_object_are_removed(client: Client, bucket: ObjectBucket) -> None:
    await bucket.put("a", b"a")
    for _ in range(3):
        await client.jetstream().publish("$O.TEST.C.unfinished", bytes(1000))
    newest = (await client.jetstream().get_last_msg("OBJ_TEST", "$O.TEST.C.unfinished")).time
    assert newest is not None
    now_ns = round(newest.timestamp() * 1e9)
    before = await bucket.size_bytes()
    assert await bucket.delete_unfinished(now_ns + 10 * 10**9, older_s=20.0) == 0
    assert await bucket.size_bytes() == before
    assert await bucket.delete_unfinished(now_ns + 10 * 10**9, older_s=5.0) == 1
    assert await bucket.size_bytes() < before - 3000
    assert await bucket.get("a") == b"a"


@pytest.mark.parametrize("token", ["a", "_w=="])  # no base64; no UTF-8
async def test_what_is_under_no_readable_name_is_not_there(client: Client, bucket: ObjectBucket, token: str) -> None:
    await bucket.put("a", b"a")
    await client.jetstream().publish(f"$O.TEST.M.{token}", b"{}")
    assert await bucket.names() == ["a"]
    assert await bucket.delete_unfinished(0, older_s=0.0) == 0
    assert await bucket.get("a") == b"a"


async def test_a_damaged_description_keeps_nothing_and_holds_up_nothing(client: Client, bucket: ObjectBucket) -> None:
    await bucket.put("a", b"a")
    await bucket.put("b", b"b")
    await client.jetstream().publish(f"$O.TEST.M.{base64.urlsafe_b64encode(b'a').decode()}", b"garbage")
    newest = (await client.jetstream().get_last_msg("OBJ_TEST", "$O.TEST.C.>")).time
    assert newest is not None
    assert await bucket.delete_unfinished(round(newest.timestamp() * 1e9) + 10**9, older_s=0.0) == 1
    assert await bucket.get("b") == b"b"


async def test_without_a_bucket_or_a_server_nothing_is_known(broker: Broker) -> None:
    async with connected(broker.url, confirm_s=0.5) as log:
        absent = log.objects("NONE")
        for ask in (
            partial(absent.get, "a"),
            partial(absent.put, "a", b"a"),
            partial(absent.delete, "a"),
            absent.names,
        ):
            with pytest.raises(BrokerUnavailable, match=r"^bucket NONE: "):
                await ask()
        bucket = await bucket_of(log)
        await bucket.put("a", b"a")
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        with pytest.raises(BrokerUnavailable, match=r"^bucket TEST: get a: not connected$"):
            await bucket.get("a")
        await broker.start()
        await eventually(lambda: log.is_connected)
        assert await bucket.get("a") == b"a"
