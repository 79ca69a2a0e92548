"""Three nats-servers that keep the streams together: the leader of KV_EVENTS is killed, or retires."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from indexer.embedded import ensure_streams
from kv_protocol import subjects
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import BrokerSilent, EventLog, StreamSpec
from tests.system.faults.children import Children
from tests.system.faults.fleet import PUBLISHED_S, READY_S, Fleet, Shape, fleet
from tests.system.faults.nats_servers import Cluster, until_all_led, until_led_by
from tests.system.faults.stream_reader import Stored, stored_in

LEADER_S = 15.0
QUIET_S = 5.0
SERVERS = 3
READERS = ("router", "index")
STREAMS = {subjects.EVENTS_STREAM, subjects.FLEET_STREAM, f"OBJ_{subjects.SNAPSHOT_BUCKET}"}


@asynccontextmanager
async def fleet_on_a_cluster(directory: Path) -> AsyncIterator[tuple[Cluster, Fleet]]:
    async with Children() as children:
        cluster = Cluster(children, directory, SERVERS)
        await cluster.start()
        urls = [server.url for server in cluster.servers.values()]
        shape = Shape(nats_settings=(f"nats.replicas={SERVERS}", "nats.events_max_bytes=67108864"))
        async with fleet(children, urls, shape) as running:
            yield cluster, running


@pytest.mark.parametrize(
    "leader", ["n0", "n1"], ids=["which all clients are connected to", "which no client is connected to"]
)
async def test_a_cluster_whose_stream_leader_is_killed_loses_nothing_and_goes_on(tmp_path: Path, leader: str) -> None:
    async with fleet_on_a_cluster(tmp_path) as (cluster, running):
        async with running.traffic() as sent:
            await until_led_by(running.nats_urls, subjects.EVENTS_STREAM, leader, SERVERS)
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await cluster.servers[leader].kill()
            await running.until_equal(LEADER_S)
            await sent.more()
        assert sent.failed == []
        await nothing_is_lost(running, kept)
        reconnects = await running.totals("log_reconnects_total", *READERS)
        assert [count >= 1 for count in reconnects] == [leader == "n0"] * len(READERS)
        await running.start_index("index-2", nats_url=",".join(running.nats_urls))
        await running.until_equal(QUIET_S, moved=False)


async def test_a_cluster_whose_stream_leader_retires_loses_nothing_and_goes_on(tmp_path: Path) -> None:
    async with fleet_on_a_cluster(tmp_path) as (cluster, running):
        async with running.traffic() as sent:
            await until_led_by(running.nats_urls, subjects.EVENTS_STREAM, "n0", SERVERS)
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await cluster.servers["n0"].retire()
            await running.until_equal(LEADER_S)
            await cluster.servers["n0"].until_retired()
            await running.until_equal(LEADER_S)
        assert sent.failed == []
        await nothing_is_lost(running, kept)
        assert min(await running.totals("log_reconnects_total", *READERS)) >= 1


async def test_streams_are_awaited_while_the_cluster_has_no_leader(tmp_path: Path) -> None:
    async with Children() as children:
        first, *others = Cluster(children, tmp_path, SERVERS).servers.values()
        await first.start()
        log = await EventLog.connect(first.url, name="early", confirm_s=0.3)
        ensuring = asyncio.ensure_future(ensure_streams(log, NatsSection(replicas=SERVERS, events_max_bytes=1 << 26)))
        try:
            with pytest.raises(BrokerSilent):
                await log.ensure_stream(StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_ALL,), 60, 1 << 20))
            assert not ensuring.done()
            await asyncio.gather(*(server.start() for server in others))
            await ensuring
            await until_all_led([server.url for server in others], STREAMS)
        finally:
            ensuring.cancel()
            await log.close()


async def nothing_is_lost(running: Fleet, kept: list[Stored]) -> None:
    await running.until_published(PUBLISHED_S)
    await until_all_led(running.nats_urls, STREAMS)  # else the cluster may have no server that can say what is stored
    await running.nothing_is_lost(kept)
    assert await running.totals("log_read_anew_total", *READERS) == [0, 0]
    await running.until_equal(QUIET_S, moved=False)
