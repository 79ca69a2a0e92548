"""SGLang's load topic over real sockets, in the bytes of its 0.5.23: what becomes a report, and what does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from kv_protocol.load import LoadReport
from kv_runtime.clock import SystemClock
from tests.system.integration.broker import eventually
from tests.system.integration.event_path import bound_in_a_row, endpoint_of, zmq_context
from worker_agent.attached.load_topic import LoadTopic

BUSY = ["LoadStat", 3, 2, 170, 1600, 0, 40, 210, 48, 9, 7]
"""running, waiting, tokens in use and all of them, rank, then what was appended since."""


@asynccontextmanager
async def topic_of(ranks: int) -> AsyncIterator[tuple[list[zmq.asyncio.Socket], LoadTopic, dict[int, LoadReport]]]:
    """A topic that is subscribed to `ranks` sockets; what was announced last."""
    announced, stop = dict[int, LoadReport](), asyncio.Event()

    async def announce(dp_rank: int, report: LoadReport) -> None:
        announced[dp_rank] = report

    async with zmq_context() as context, asyncio.TaskGroup() as group:
        sockets = bound_in_a_row(context, zmq.XPUB, ranks)
        endpoints = dict(enumerate(map(endpoint_of, sockets)))
        topic = LoadTopic(endpoints, context, SystemClock(), announce, instance="i", block_size=16, total_blocks=7)
        group.create_task(topic.run(stop))
        for socket in sockets:
            assert await socket.recv() == b"\x01"
        yield sockets, topic, announced
        stop.set()


async def tell(socket: zmq.asyncio.Socket, stat: object) -> None:
    await socket.send_multipart([b"load", bytes(8), msgspec.msgpack.encode(stat)])


async def test_a_reading_is_the_report_of_its_sockets_rank() -> None:
    async with topic_of(2) as (sockets, topic, announced):
        await tell(sockets[1], BUSY)
        await eventually(lambda: announced)
        report = LoadReport(
            instance="i", iteration=1, running_requests=3, waiting_requests=2, used_blocks=11, total_blocks=100
        )
        assert announced == topic.newest == {1: report}


async def test_the_newest_reading_counts_and_a_cache_of_unknown_size_has_the_known_blocks() -> None:
    async with topic_of(1) as (sockets, topic, announced):
        for stat in (BUSY, ["LoadStat", 1, 0, 16, 0, None]):
            await tell(sockets[0], stat)
        await eventually(lambda: announced.get(0) and announced[0].running_requests == 1)
        assert (topic.newest[0].used_blocks, topic.newest[0].total_blocks) == (1, 7)


async def test_what_is_no_reading_is_refused_and_the_next_one_counts() -> None:
    with capture_logs() as logged:
        async with topic_of(1) as (sockets, _, announced):
            for strange in ({"a": 1}, ["LoadStat", -1, 0, 0, 0], BUSY):
                await tell(sockets[0], strange)
            await eventually(lambda: announced)
    assert announced[0].running_requests == 3
    assert [line["event"] for line in logged] == ["load_reading_refused"]
