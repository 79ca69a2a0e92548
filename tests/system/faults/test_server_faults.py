"""One nats-server under a fleet that serves: it is killed, loses its data, stands still, retires."""

from pathlib import Path

from tests.system.faults.fleet import READY_S, Fleet, fleet_on_one_server
from tests.system.faults.stream_reader import stored_in

KILLED_S = 10.0
EMPTY_S = 10.0
FROZEN_S = 10.0
RETIRED_S = 15.0
QUIET_S = 5.0
READERS = ("router", "index")


async def all_processes_lost_and_found_the_log(running: Fleet) -> None:
    names = (*READERS, *running.worker_ids)
    assert min(await running.totals("log_reconnects_total", *names)) >= 1
    assert await running.totals("log_connected", *names) == [1] * len(names)
    assert sum(await running.totals("publish_failures_total", *running.worker_ids)) >= 1


async def test_a_killed_server_that_has_its_data_again_has_lost_nothing_acknowledged(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (server, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await server.kill()
            await sent.more()
            await server.start()
            await running.until_equal(KILLED_S)
        assert sent.failed == []
        await running.nothing_is_lost(kept)
        await all_processes_lost_and_found_the_log(running)
        assert await running.totals("log_read_anew_total", *READERS) == [0, 0]
        await running.until_equal(QUIET_S, moved=False)


async def test_a_killed_server_that_comes_back_empty_leaves_indexes_right_and_the_gap_is_recorded(
    tmp_path: Path,
) -> None:
    async with fleet_on_one_server(tmp_path) as (server, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            await server.kill()
            server.lose_store()
            await sent.more()
            await server.start()
            await running.until_equal(EMPTY_S)
            await running.start_index("index-2")
            await running.until_equal(EMPTY_S, only=["index-2"])
        assert sent.failed == []
        await all_processes_lost_and_found_the_log(running)
        assert min(await running.totals("log_read_anew_total", *READERS)) >= 1
        assert await running.totals("log_read_anew_total", "index-2") == [0]
        await running.until_equal(QUIET_S, moved=False)


async def test_a_stopped_server_blocks_no_client_and_loses_nothing(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (server, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            server.child.freeze()
            await sent.more(80)
            server.child.thaw()
            await running.until_equal(FROZEN_S)
        assert sent.failed == []
        await running.nothing_is_lost(kept)
        await all_processes_lost_and_found_the_log(running)
        await running.until_equal(QUIET_S, moved=False)


async def test_a_server_that_retires_hands_over_to_the_next_one_on_its_port(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (server, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await server.retire()
            await sent.more()
            await server.until_retired()
            await server.start()
            await running.until_equal(RETIRED_S)
        assert sent.failed == []
        await running.nothing_is_lost(kept)
        await all_processes_lost_and_found_the_log(running)
        await running.until_equal(QUIET_S, moved=False)
