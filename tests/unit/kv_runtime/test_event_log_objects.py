"""Objects in a bucket: whole or not there, and of an unfinished put nothing stays."""

import base64
from functools import partial

import nats
import pytest
import pytest_asyncio

from kv_runtime.event_log import BrokerUnavailable, EventLog, NoSuchObject, ObjectBucket, ObjectDamaged
from kv_runtime.event_log.objects import CHUNK_BYTES
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import connected

MAX_BYTES = 8 << 20


async def bucket_of(log: EventLog) -> ObjectBucket:
    await log.ensure_bucket("TEST", replicas=1, max_bytes=MAX_BYTES)
    return log.objects("TEST")


@pytest_asyncio.fixture
async def bucket(log: EventLog) -> ObjectBucket:
    return await bucket_of(log)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7])
async def test_what_was_put_is_got_also_by_other_clients(broker: Broker, bucket: ObjectBucket, size: int) -> None:
    data = bytes(at % 251 for at in range(size))
    await bucket.put("a", data)
    assert await bucket.get("a") == data
    client = await nats.connect(broker.url)
    theirs = await client.jetstream().object_store("TEST")
    assert (await theirs.get("a")).data == data
    await theirs.put("b", data)
    assert await bucket.get("b") == data
    assert await bucket.names() == ["a", "b"]
    await client.close()


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


async def test_what_others_deleted_is_not_there(broker: Broker, bucket: ObjectBucket) -> None:
    await bucket.put("a", b"a")
    client = await nats.connect(broker.url)
    await (await client.jetstream().object_store("TEST")).delete("a")
    await client.close()
    with pytest.raises(NoSuchObject):
        await bucket.get("a")
    await bucket.delete("a")
    assert (await bucket.names(), await bucket.size_bytes()) == ([], 0)


@pytest.mark.parametrize("damage", ["gone", "other", "more", "description"])
async def test_what_is_not_what_was_put_is_refused(broker: Broker, bucket: ObjectBucket, damage: str) -> None:
    await bucket.put("a", bytes(CHUNK_BYTES * 2))
    client = await nats.connect(broker.url)
    context = client.jetstream()
    if damage == "description":
        await context.publish(f"$O.TEST.M.{base64.urlsafe_b64encode(b'a').decode()}", b"garbage")
    else:
        await client.jsm().delete_msg("OBJ_TEST", 1)
    if damage in ("other", "more"):
        subject = (await context.get_msg("OBJ_TEST", 2)).subject
        assert subject is not None
        await context.publish(subject, bytes([1]) * CHUNK_BYTES if damage == "other" else bytes(CHUNK_BYTES + 1))
    await client.close()
    with pytest.raises(ObjectDamaged, match="object a: "):
        await bucket.get("a")


async def test_what_does_not_fit_is_refused_and_leaves_nothing(bucket: ObjectBucket) -> None:
    await bucket.put("a", bytes(6 << 20))
    full = await bucket.size_bytes()
    with pytest.raises(BrokerUnavailable, match=r"^bucket TEST: put b: .*maximum bytes exceeded"):
        await bucket.put("b", bytes(4 << 20))
    assert (await bucket.names(), await bucket.size_bytes()) == (["a"], full)
    assert await bucket.get("a") == bytes(6 << 20)


async def test_old_chunks_without_an_object_are_removed(broker: Broker, bucket: ObjectBucket) -> None:
    await bucket.put("a", b"a")
    client = await nats.connect(broker.url)
    for _ in range(3):
        await client.jetstream().publish("$O.TEST.C.unfinished", bytes(1000))
    newest = (await client.jetstream().get_last_msg("OBJ_TEST", "$O.TEST.C.unfinished")).time
    await client.close()
    assert newest is not None
    now_ns = round(newest.timestamp() * 1e9)
    before = await bucket.size_bytes()
    assert await bucket.delete_unfinished(now_ns + 10 * 10**9, older_s=20.0) == 0
    assert await bucket.size_bytes() == before
    assert await bucket.delete_unfinished(now_ns + 10 * 10**9, older_s=5.0) == 1
    assert await bucket.size_bytes() < before - 3000
    assert await bucket.get("a") == b"a"


@pytest.mark.parametrize("token", ["a", "_w=="])  # no base64; no UTF-8
async def test_what_is_under_no_readable_name_is_not_there(broker: Broker, bucket: ObjectBucket, token: str) -> None:
    await bucket.put("a", b"a")
    client = await nats.connect(broker.url)
    await client.jetstream().publish(f"$O.TEST.M.{token}", b"{}")
    await client.close()
    assert await bucket.names() == ["a"]
    assert await bucket.delete_unfinished(0, older_s=0.0) == 0
    assert await bucket.get("a") == b"a"


async def test_a_damaged_description_keeps_nothing_and_holds_up_nothing(broker: Broker, bucket: ObjectBucket) -> None:
    await bucket.put("a", b"a")
    await bucket.put("b", b"b")
    client = await nats.connect(broker.url)
    await client.jetstream().publish(f"$O.TEST.M.{base64.urlsafe_b64encode(b'a').decode()}", b"garbage")
    newest = (await client.jetstream().get_last_msg("OBJ_TEST", "$O.TEST.C.>")).time
    await client.close()
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
