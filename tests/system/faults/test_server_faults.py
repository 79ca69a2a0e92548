"""One nats-server under a fleet that serves: it is killed, loses its data, stands still, retires, is full."""

from collections.abc import Awaitable, Callable
from signal import SIGKILL

import pytest

from tests.system.faults.fleet import READY_S, Fleet, fleet, freeze, thaw
from tests.system.faults.nats_servers import Limits, configure, lose_store, retire
from tests.system.faults.stream_reader import first_seq_of, squeezed, stored_in
from tests.system.faults.traffic import Traffic

RIGHT_S = 15.0
QUIET_S = 5.0
FEW_BYTES = 4096
"""A few messages; and less than the streams have after a second."""
READERS = ("router", "index")
SERVER = "nats-0"
Fault = Callable[[Fleet, Traffic], Awaitable[None]]


async def killed(running: Fleet, sent: Traffic) -> None:
    await running.stop(SERVER, SIGKILL)
    await sent.more()
    await running.start_again(SERVER)


async def stopped(running: Fleet, sent: Traffic) -> None:
    freeze(running.all[SERVER])
    await sent.more(80)
    thaw(running.all[SERVER])


async def retired(running: Fleet, sent: Traffic) -> None:
    await retire(running.all[SERVER])
    await sent.more()
    await running.until_retired(SERVER)
    await running.start_again(SERVER)


async def full(running: Fleet, sent: Traffic) -> None:
    await running.stop(SERVER, SIGKILL)
    configure(running.all[SERVER], Limits(file_store_bytes=FEW_BYTES))
    await running.start_again(SERVER)
    await running.all[SERVER].line_with("resource limits exceeded")
    before = await running.totals("publish_failures_total", *running.worker_ids)
    await sent.more(40)
    after = await running.totals("publish_failures_total", *running.worker_ids)
    assert all(earlier < later for earlier, later in zip(before, after, strict=True)), (before, after)
    assert min(await running.totals("outbox_bytes", *running.worker_ids)) > 0
    await running.stop(SERVER, SIGKILL)
    configure(running.all[SERVER], Limits())
    await running.start_again(SERVER)


async def all_processes_lost_and_found_the_log(running: Fleet) -> None:
    names = (*READERS, *running.worker_ids)
    assert min(await running.totals("log_reconnects_total", *names)) >= 1
    assert await running.totals("log_connected", *names) == [1] * len(names)
    assert sum(await running.totals("publish_failures_total", *running.worker_ids)) >= 1


@pytest.mark.parametrize("fault", [killed, stopped, retired, full], ids=lambda fault: fault.__name__)
async def test_nothing_that_a_server_confirmed_is_lost_and_what_it_refused_arrives(fault: Fault) -> None:
    async with fleet() as running:
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            kept = await stored_in(running.nats_urls)
            await fault(running, sent)
            await running.until_equal(RIGHT_S)
        assert sent.failed == []
        await running.nothing_is_lost(kept)
        await all_processes_lost_and_found_the_log(running)
        assert await running.totals("log_read_anew_total", *READERS) == [0, 0]
        for metric in ("outbox_dropped_total", "outbox_bytes"):
            assert await running.totals(metric, *running.worker_ids) == [0, 0, 0]
        await running.until_equal(QUIET_S, moved=False)


async def test_a_killed_server_that_comes_back_empty_leaves_indexes_right_and_the_gap_is_recorded() -> None:
    async with fleet() as running:
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            await running.stop(SERVER, SIGKILL)
            lose_store(running.all[SERVER])
            await sent.more()
            await running.start_again(SERVER)
            await running.until_equal(RIGHT_S)
            await running.start_index("index-2")
            await running.until_equal(RIGHT_S, only=["index-2"])
        assert sent.failed == []
        await all_processes_lost_and_found_the_log(running)
        assert min(await running.totals("log_read_anew_total", *READERS)) >= 1
        assert await running.totals("log_read_anew_total", "index-2") == [0]
        await running.until_equal(QUIET_S, moved=False)


async def test_an_index_that_starts_while_a_full_stream_discards_its_oldest_asks_for_what_is_gone() -> None:
    async with fleet() as running:
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            async with squeezed(running.nats_urls, FEW_BYTES):
                await sent.more(40)
                await running.start_index("index-2")
                await running.until_equal(RIGHT_S)
        assert sent.failed == []
        assert await first_seq_of(running.nats_urls) > 1
        assert min(await running.totals("stream_gaps_total", "index-2")) >= 1
        assert await running.totals("log_read_anew_total", "router", "index", "index-2") == [0, 0, 0]
        await running.until_equal(QUIET_S, moved=False)
