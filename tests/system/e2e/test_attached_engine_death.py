"""One of two attached vLLM servers dies in the middle of 200 streams: each client gets an undisturbed run's text.

It is killed, or its engine core dies and it reports that in each stream. Router, agents and engines are real
processes. The engines are `tests/support/vllm_server.py`: each stream stops in its middle until it is released, so
that at the kill all streams have begun and none has ended.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from bench.processes import ChildProcess
from kv_runtime.clock import Clock
from tests.support.processes import running
from tests.support.vllm_server import stream_events
from tests.system.e2e.test_attached_engines import MODEL, Cluster, attaching, running_cluster

STREAMS = 200
WAIT_S = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Death = Callable[[aiohttp.ClientSession, ChildProcess, str], Awaitable[None]]


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Return one of the requests: every second a chat, every fourth with a stop string, every third with usage."""
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 150 + number % 7}
    body |= {"stop": ["END", "nothing"]} if number % 4 == 1 else {}
    body |= {"stream_options": {"include_usage": True}} if number % 3 == 0 else {}
    if number % 2:
        return CHAT, body | {"messages": [{"role": "user", "content": f"person {number} asks"}]}
    return COMPLETIONS, body | {"prompt": f"person {number} writes"}


def said(events: bytes) -> tuple[str, str, dict[str, int], bool]:
    """Return a stream's text, its finish reason, the counts of its usage, and whether it is complete."""
    text, reason, usage = "", "", dict[str, int]()
    for line in events.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = msgspec.json.decode(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            reason = choice["finish_reason"] or reason
            assert choice.get("token_ids") is None
        usage = event["usage"] if event.get("usage") else usage
    return text, reason, usage, events.endswith(b"data: [DONE]\n\n")


@asynccontextmanager
async def engine(cluster: Cluster, worker: str) -> AsyncIterator[tuple[ChildProcess, str]]:
    """An engine's server and the agent that attaches it; yields the server and its address."""
    process = ChildProcess(worker, [sys.executable, "-m", "tests.support.vllm_server", MODEL])
    async with running(process) as server:
        url = (await server.line_with("vllm on")).split()[2]
        async with attaching(cluster, worker, url):
            yield server, url


async def stream(session: aiohttp.ClientSession, cluster: Cluster, number: int) -> tuple[str, bytes]:
    path, body = request(number)
    async with session.post(f"{cluster.client.data_url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-worker-instance-id"], await response.read()


async def until_held(session: aiohttp.ClientSession, urls: list[str], streams: int) -> None:
    held = -1
    try:
        async with asyncio.timeout(WAIT_S):
            while held != streams:
                await Clock().sleep(0.05)
                held = 0
                for url in urls:
                    async with session.get(f"{url}/held") as response:
                        held += int(await response.text())
    except TimeoutError:
        raise AssertionError(f"{held} of {streams} streams are in their middle") from None


async def killed(_session: aiohttp.ClientSession, victim: ChildProcess, _url: str) -> None:
    os.kill(victim.pid, signal.SIGKILL)


async def without_core(session: aiohttp.ClientSession, _victim: ChildProcess, url: str) -> None:
    async with session.post(f"{url}/die") as response:
        assert response.status == 200


@pytest.mark.parametrize("dies", [killed, without_core])
async def test_every_stream_of_a_dead_engine_goes_on_at_another_without_a_seam(dies: Death) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        running_cluster() as cluster,
        engine(cluster, "va") as (victim, victim_url),
        engine(cluster, "vb") as (_, other_url),
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await cluster.until_choosing_among("va", "vb")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(session, cluster, number)) for number in range(STREAMS)]
            await until_held(session, [victim_url, other_url], STREAMS)
            await dies(session, victim, victim_url)
            async with session.post(f"{other_url}/release") as response:
                assert response.status == 200
        answers = [task.result() for task in tasks]
        moved = Counter(worker for worker, _ in answers)["va"]
        assert STREAMS // 4 <= moved <= STREAMS * 3 // 4
        for number, (_, events) in enumerate(answers):
            assert said(events) == said(b"".join(stream_events(*request(number)))), number
        shown = await cluster.client.scrape()
        assert shown.total("streams_lost_total") == 0
        migrated = shown.total("request_turns_total", reason="migrated")
        assert moved // 2 <= migrated <= moved, "of some streams only the end was missing"
