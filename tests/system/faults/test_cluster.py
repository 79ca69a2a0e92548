"""Three nats-servers that keep the streams together: the leader of KV_EVENTS is killed, or retires."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.processes import LED
from indexer.embedded import ensure_streams
from kv_protocol import subjects
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import BrokerSilent, EventLog, StreamSpec
from tests.system.faults.children import Children
from tests.system.faults.fleet import PUBLISHED_S, READY_S, Fleet, Shape, fleet
from tests.system.faults.nats_servers import NatsServer, nats_servers, until_all_led, until_led_by
from tests.system.faults.stream_reader import stored_in

LEADER_S = 15.0
QUIET_S = 5.0
SERVERS = 3
READERS = ("router", "index")
STREAMS = {subjects.EVENTS_STREAM, subjects.FLEET_STREAM, f"OBJ_{subjects.SNAPSHOT_BUCKET}"}


@asynccontextmanager
async def fleet_on_a_cluster(directory: Path) -> AsyncIterator[tuple[list[NatsServer], Fleet]]:
    async with Children() as children:
        servers = nats_servers(children, directory, SERVERS)
        await asyncio.gather(*(server.start() for server in servers))
        await asyncio.gather(*(server.child.line_with(LED) for server in servers))
        urls = [server.url for server in servers]
        shape = Shape(nats_settings=(f"nats.replicas={SERVERS}", "nats.events_max_bytes=67108864"))
        async with fleet(children, urls, shape) as running:
            yield servers, running


@pytest.mark.parametrize(
    ("leader", "retires"),
    [(0, False), (1, False), (0, True)],
    ids=["killed, with all clients", "killed, without clients", "retires, with all clients"],
)
async def test_a_cluster_whose_stream_leader_is_gone_loses_nothing_and_goes_on(
    tmp_path: Path, leader: int, *, retires: bool
) -> None:
    async with fleet_on_a_cluster(tmp_path) as (servers, running):
        server = servers[leader]
        async with running.traffic() as sent:
            await until_led_by(running.nats_urls, subjects.EVENTS_STREAM, server.name, SERVERS)
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await (server.retire() if retires else server.kill())
            await running.until_equal(LEADER_S)
            if retires:
                await server.until_retired()
                await running.until_equal(LEADER_S)
            await sent.more()
        assert sent.failed == []
        await running.until_published(PUBLISHED_S)
        await until_all_led(running.nats_urls, STREAMS)  # else perhaps no server can say what is stored
        await running.nothing_is_lost(kept)
        assert await running.totals("log_read_anew_total", *READERS) == [0, 0]
        reconnects = await running.totals("log_reconnects_total", *READERS)
        assert [count >= 1 for count in reconnects] == [leader == 0] * len(READERS)
        await running.start_index("index-2", nats_url=",".join(running.nats_urls))
        await running.until_equal(QUIET_S, moved=False)


async def test_streams_are_awaited_while_the_cluster_has_no_leader(tmp_path: Path) -> None:
    async with Children() as children:
        first, *others = nats_servers(children, tmp_path, SERVERS)
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
