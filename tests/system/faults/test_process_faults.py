"""Our own processes are killed, restarted and frozen under load, beside a nats-server that is well."""

import pytest

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from tests.system.faults.fleet import READY_S, fleet, freeze, thaw
from tests.system.faults.nats_servers import Limits
from tests.system.faults.stream_reader import connected_to
from tests.system.faults.traffic import MODEL

AGENT_S = 10.0
ROUTER_S = 10.0
SLOW_S = 10.0
QUIET_S = 5.0
BURST_MESSAGES, BURST_BYTES = 64, 512 * 1024
"""More than the system keeps for a connection that is not read: 10 MB or so."""


async def test_a_killed_agent_costs_no_request_and_comes_back_as_a_new_life() -> None:
    async with fleet() as running:
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            before = {name: await running.scrape(name) for name in ("router", "index")}
            freeze(running.workers["w1"])
            await running.until_promised("w1")  # what it was given it does not answer: it is killed in the middle of it
            await running.kill("w1")
            await sent.more()
            await running.start_worker("w1")
            await running.until_equal(AGENT_S)
        assert sent.failed == []
        for name, earlier in before.items():
            later = await running.scrape(name)
            restarts = [
                each.total("stream_restarts_total", worker=worker)
                for each in (earlier, later)
                for worker in ("w0", "w1")
            ]
            assert restarts == [0, 0, 0, 1]
        router = await running.scrape("router")
        assert router.total("worker_failures_total", worker="w1") >= 1
        assert router.total("retries_total") >= 1
        await running.until_equal(QUIET_S, moved=False)


async def test_a_restarted_router_answers_every_connected_client_and_is_exact_again() -> None:
    async with fleet() as running:
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            await running.stop("router")
            await running.start_again("router")
            await running.until_equal(ROUTER_S)
            await sent.more()
        assert sent.failed == []
        assert sent.waited >= 1
        router = await running.scrape("router")
        assert router.total("requests_total", outcome="ok") >= 20
        await running.until_equal(QUIET_S, moved=False)


async def test_an_index_that_was_cut_off_as_a_slow_consumer_reads_on() -> None:
    async with fleet(limits=Limits(write_deadline_s=1.0)) as running:
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            index = running.all["index"]
            freeze(index)
            with pytest.raises(AssertionError, match="not equal within"):  # one that stands still proves nothing
                await running.until_equal(2.0, only=["index"])
            async with connected_to(running.nats_urls) as client:
                for _ in range(BURST_MESSAGES):
                    await client.publish(subjects.heartbeat(MODEL, WorkerRank("unknown", 0)), bytes(BURST_BYTES))
                await client.flush()
            await running.nats_servers["nats-0"].line_with("Slow Consumer Detected")
            await sent.more(10)
            thaw(index)
            await running.until_equal(SLOW_S)
        assert sent.failed == []
        assert min(await running.totals("log_reconnects_total", "index")) >= 1
        await running.until_equal(QUIET_S, moved=False)
        workers = [await running.scrape(worker_id) for worker_id in running.worker_ids]
        removed = [each.total("mirror_blocks_changed_total", kind="removed") for each in workers]
        assert min(removed) > 0, "caches are small enough to forget"
