"""What a server keeps has an end: the stream's limit, where the oldest go, and the store's, where nothing comes."""

from pathlib import Path

from tests.system.faults.fleet import READY_S, fleet_on_one_server
from tests.system.faults.nats_servers import Limits
from tests.system.faults.stream_reader import first_seq_of, squeezed, stored_in

DISCARDED_S = 10.0
ROOM_S = 10.0
QUIET_S = 5.0
FEW_BYTES = 4096
"""A few messages; and less than the streams have after a second."""


async def test_an_index_that_starts_while_a_full_stream_discards_its_oldest_asks_for_what_is_gone(
    tmp_path: Path,
) -> None:
    async with fleet_on_one_server(tmp_path) as (_, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            async with squeezed(running.nats_urls, FEW_BYTES):
                await sent.more(40)
                await running.start_index("index-2")
                await running.until_equal(DISCARDED_S)
        assert sent.failed == []
        assert await first_seq_of(running.nats_urls) > 1
        assert min(await running.totals("stream_gaps_total", "index-2")) >= 1
        assert await running.totals("log_read_anew_total", "router", "index", "index-2") == [0, 0, 0]
        await running.until_equal(QUIET_S, moved=False)


async def test_a_full_store_stops_no_process_and_refused_messages_arrive_once_it_has_space(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (server, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await server.kill()
            await server.start(Limits(file_store_bytes=FEW_BYTES))
            await server.child.line_with("resource limits exceeded")
            before = await running.totals("publish_failures_total", *running.worker_ids)
            await sent.more(40)
            after = await running.totals("publish_failures_total", *running.worker_ids)
            assert all(earlier < later for earlier, later in zip(before, after, strict=True)), (before, after)
            assert min(await running.totals("outbox_bytes", *running.worker_ids)) > 0
            await server.kill()
            await server.start()
            await running.until_equal(ROOM_S)
        assert sent.failed == []
        await running.nothing_is_lost(kept)
        await running.until_equal(QUIET_S, moved=False)
        for metric in ("outbox_dropped_total", "outbox_bytes"):
            assert await running.totals(metric, *running.worker_ids) == [0, 0, 0]
