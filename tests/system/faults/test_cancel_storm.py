"""A thousand streams are cut in their middle: 2 s later nothing is promised, waits, or is connected any more."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from kv_runtime.clock import SystemClock
from tests.system.faults.fleet import Fleet, Shape, fleet_on_one_server
from tests.system.faults.traffic import MODEL

STREAMS = 1000
WORKERS = 4
EMPTY_S = 2.0
"""By then nothing may be left of the streams."""
BEGUN_S = 60.0
_LOOK_S = 0.05
_ROOMY = (
    "engine.total_kv_blocks=100000",
    "engine.max_num_seqs=512",
    "engine.default_max_tokens=4000",
    "engine.max_seq_len=8192",
    "engine.speed=0.1",  # a thousand streams at full speed are more than two cores can make
)
LEFT = (
    "inflight_requests",
    "queued_requests",
    "ledger_active_requests",
    "ledger_active_blocks",
    "ledger_prefill_tokens_queued",
)
"""Of the router; `ENGINE_LEFT` of its workers."""
ENGINE_LEFT = ("agent_inflight_requests", "engine_running_requests", "engine_waiting_requests")


def request(number: int) -> bytes:
    """Return a stream's request; the prompts of all streams have the same beginning."""
    prompt = "each text begins like this, " * 4 + f"and goes on as number {number}"
    body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": 4000}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def begin(port: int, number: int) -> asyncio.StreamWriter:
    """Return the connection of a stream of which some events have come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(number))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    await reader.readuntil(b"\n\n")
    return writer


async def left(running: Fleet) -> dict[str, float]:
    """Return whatever is not 0."""
    router = await running.scrape("router")
    found = {f"router {name}": router.total(name) for name in LEFT}
    for worker_id in running.worker_ids:
        worker = await running.scrape(worker_id)
        found |= {f"{worker_id} {name}": worker.total(name) for name in ENGINE_LEFT}
    return {name: value for name, value in found.items() if value}


def open_connections(running: Fleet) -> int:
    """Return how many connections of clients the router has, or has not let go of."""
    port = int(running.data_url.rpartition(":")[2])
    connections = psutil.Process(running.processes["router"].pid).net_connections("tcp")
    return sum(each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in connections)


@pytest.mark.asyncio
async def test_a_thousand_streams_cut_in_their_middle_leave_nothing_behind(tmp_path: Path) -> None:
    shape = Shape(workers=WORKERS, worker_settings=_ROOMY)
    async with fleet_on_one_server(tmp_path, shape) as (_, running):
        port = int(running.data_url.rpartition(":")[2])
        others = open_connections(running)
        async with asyncio.timeout(BEGUN_S):
            writers = await asyncio.gather(*(begin(port, number) for number in range(STREAMS)))
        busy = await left(running)
        assert busy["router inflight_requests"] == busy["router ledger_active_requests"] == STREAMS
        assert sum(busy[f"{worker_id} agent_inflight_requests"] for worker_id in running.worker_ids) == STREAMS
        assert open_connections(running) >= STREAMS + others
        for writer in writers:
            writer.transport.abort()
        clock = SystemClock()
        end_s = clock.now() + EMPTY_S
        while (found := await left(running)) or open_connections(running) > others:
            assert clock.now() < end_s, (found, open_connections(running))
            await clock.sleep(_LOOK_S)
