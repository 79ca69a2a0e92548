"""Processes for as long as a block lasts; `worker-agent serve --engine trtllm` among them, with the fake library."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from bench.processes import ChildProcess
from tests.support.trtllm import environment

BLOCK_SIZE = 16
ENGINE = (
    *("--engine", "trtllm", "--model", "none", "--served-name", "sim-8b", "--set", "engine.text=byte"),
    *("--kv-block-size", str(BLOCK_SIZE), "--max-seq-len", "4096", "--publish-kv-events", "--publish-metrics"),
)
"""A worker with events and statistics, 16-token blocks, and the byte model's text."""


def agent_process(worker_id: str, nats_url: str, *arguments: str) -> ChildProcess:
    """Return the process of a worker, not started yet."""
    command = [sys.executable, "-m", "worker_agent", "serve", "--worker-id", worker_id, "--nats-url", nats_url]
    return ChildProcess(worker_id, [*command, *arguments])


def with_fake(**told: Any) -> dict[str, str]:
    """Return the variables of a process for which `tensorrt_llm` is the fake, main thread only; `told` is for it."""
    return environment(main_thread_only=True, **told)


@asynccontextmanager
async def running(process: ChildProcess, **variables: str) -> AsyncIterator[ChildProcess]:
    """Be where the process runs, with these variables; ask it to stop in the end, if it still does."""
    async with asyncio.TaskGroup() as group:
        await process.start(group, variables)
        try:
            yield process
        finally:
            await process.end()


class RunningRouter(NamedTuple):
    """A router's process and the addresses that it printed."""

    process: ChildProcess
    data_url: str
    control_url: str
    nats_url: str


@asynccontextmanager
async def running_router(*arguments: str) -> AsyncIterator[RunningRouter]:
    """Run a router in mode kv on free ports, with these further arguments; it must print no traceback."""
    command = [sys.executable, "-m", "router", "--mode", "kv", "--port", "0", "--control-port", "0", *arguments]
    async with running(ChildProcess("router", command)) as process:
        urls = [(await process.line_with(words)).split()[2] for words in ("router on", "control plane", "event log")]
        yield RunningRouter(process, *urls)
    assert "Traceback" not in process.output


@asynccontextmanager
async def running_agent(worker_id: str, nats_url: str, *arguments: str, **told: Any) -> AsyncIterator[ChildProcess]:
    """Be where a worker with the fake runs."""
    async with running(agent_process(worker_id, nats_url, *arguments), **with_fake(**told)) as process:
        yield process
