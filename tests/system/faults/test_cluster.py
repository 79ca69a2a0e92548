"""Three nats-servers that keep the streams together: the leader of KV_EVENTS is killed, or retires."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from signal import SIGKILL

import pytest

from bench.processes import READY, ChildProcess, nats_cluster
from indexer.embedded import ensure_streams
from kv_protocol import subjects
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import BrokerSilent, EventLog, StreamSpec
from tests.support.processes import running
from tests.system.faults import fleet as fleet_module
from tests.system.faults.fleet import PUBLISHED_S, QUIET, READY_S, fleet
from tests.system.faults.nats_servers import retire, until_all_led, until_led_by
from tests.system.faults.stream_reader import stored_in

LEADER_S = 15.0
QUIET_S = 5.0
SERVERS = 3
READERS = ("router", "index")
STREAMS = {subjects.EVENTS_STREAM, subjects.FLEET_STREAM, f"OBJ_{subjects.SNAPSHOT_BUCKET}"}


NATS = (f"nats.replicas={SERVERS}", "nats.events_max_bytes=67108864")
SHAPE = fleet_module.SHAPE._replace(nats_servers=SERVERS, router_settings=(*QUIET, *NATS))


@pytest.mark.parametrize(
    ("leader", "retires"),
    [(0, False), (1, False), (0, True)],
    ids=["killed, with all clients", "killed, without clients", "retires, with all clients"],
)
async def test_a_cluster_whose_stream_leader_is_gone_loses_nothing_and_goes_on(leader: int, *, retires: bool) -> None:
    async with fleet(SHAPE, index_settings=NATS) as there:
        name = f"nats-{leader}"
        async with there.traffic() as sent:
            await until_led_by(there.nats_urls, subjects.EVENTS_STREAM, name, SERVERS)
            await there.until_equal(READY_S)
            kept = await stored_in(there.nats_urls)
            await (retire(there.all[name]) if retires else there.stop(name, SIGKILL))
            await there.until_equal(LEADER_S)
            if retires:
                await there.until_retired(name)
                await there.until_equal(LEADER_S)
            await sent.more()
        assert sent.failed == []
        await there.until_published(PUBLISHED_S)
        await until_all_led(there.nats_urls, STREAMS)  # else perhaps no server can say what is stored
        await there.nothing_is_lost(kept)
        assert await there.totals("log_read_anew_total", *READERS) == [0, 0]
        reconnects = await there.totals("log_reconnects_total", *READERS)
        assert [count >= 1 for count in reconnects] == [leader == 0] * len(READERS)
        await there.start_index("index-2", nats_url=",".join(there.nats_urls))
        await there.until_equal(QUIET_S, moved=False)


async def test_streams_are_awaited_while_the_cluster_has_no_leader(tmp_path: Path) -> None:
    urls, commands = nats_cluster(SERVERS, tmp_path)
    first, *others = (ChildProcess(name, command) for name, command in commands.items())
    async with AsyncExitStack() as cleanup:
        await (await cleanup.enter_async_context(running(first))).line_with(READY)
        log = await EventLog.connect(urls.split(",")[0], name="early", confirm_s=0.3)
        ensuring = asyncio.ensure_future(ensure_streams(log, NatsSection(replicas=SERVERS, events_max_bytes=1 << 26)))
        try:
            with pytest.raises(BrokerSilent):
                await log.ensure_stream(StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_ALL,), 60, 1 << 20))
            assert not ensuring.done()
            for server in others:
                await cleanup.enter_async_context(running(server))
            await ensuring
            await until_all_led(urls.split(",")[1:], STREAMS)
        finally:
            ensuring.cancel()
            await log.close()
