"""Streams as they are wanted: made, taken over, kept up, or refused with the field that differs."""

import asyncio
from typing import Any

import nats
import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from kv_runtime.event_log import BrokerUnavailable, EventLog, StreamUnfit
from tests.system.integration.broker import Broker, eventually
from tests.unit.kv_runtime.log_client import STREAM, Reader, connected, numbers, publish_all


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


async def test_what_others_set_on_a_stream_stays(broker: Broker, log: EventLog) -> None:
    client = await nats.connect(broker.url)
    manager = client.jsm()
    await manager.add_stream(name="TEST", subjects=["test.>"], description="ours", max_msgs=7, max_bytes=1000)
    await log.ensure_stream(STREAM)
    config = (await manager.stream_info("TEST")).config
    assert (config.description, config.max_msgs, config.max_bytes) == ("ours", 7, STREAM.max_bytes)
    await client.close()


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
    broker: Broker, log: EventLog, settings: dict[str, Any], error: str
) -> None:
    client = await nats.connect(broker.url)
    await client.jsm().add_stream(StreamConfig(name="TEST", subjects=["test.>"]), **settings)
    before = await client.jsm().stream_info("TEST")
    with pytest.raises(StreamUnfit) as raised:
        await log.ensure_stream(STREAM)
    assert str(raised.value) == f"stream TEST: {error}"
    assert (raised.value.stream, raised.value.field) == ("TEST", error.partition(":")[0])
    assert (await client.jsm().stream_info("TEST")).config == before.config
    await client.close()


async def test_a_sealed_stream_and_a_mirror_are_refused(broker: Broker, log: EventLog) -> None:
    client = await nats.connect(broker.url)
    manager = client.jsm()
    sealed = await manager.add_stream(name="TEST", subjects=["test.>"], storage="file")
    await manager.update_stream(sealed.config, sealed=True)
    await manager.add_stream(name="COPY", mirror={"name": "TEST"})
    with pytest.raises(StreamUnfit, match="sealed: found True, allowed none"):
        await log.ensure_stream(STREAM)
    with pytest.raises(StreamUnfit, match=r"mirror: found .*TEST.*, allowed none"):
        await log.ensure_stream(STREAM._replace(name="COPY", subjects=("copy.>",)))
    await client.close()


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
    reader = Reader()
    await log.ensure_stream(STREAM)
    await log.follow("TEST", "test.>", reader.on_message)
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
