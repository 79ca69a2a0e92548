"""`worker-agent serve --engine trtllm` as a process, with the fake TensorRT-LLM in place of the real one."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.processes import Process
from tests.support.trtllm import environment

BLOCK_SIZE = 16
ENGINE = (
    *("--engine", "trtllm", "--model", "none", "--served-name", "sim-8b", "--set", "engine.text=byte"),
    *("--kv-block-size", str(BLOCK_SIZE), "--max-seq-len", "4096", "--publish-kv-events", "--publish-metrics"),
    *("--set", "events.poll_s=0.005", "--set", "telemetry.log_format=json"),
)
"""A worker with events and statistics, 16-token blocks, and the byte model's text."""


class AgentProcess(Process):
    """One agent, whose end can be asked for, waited for, and read."""

    async def exit_code(self) -> int:
        """Return what it ended with, once it has."""
        assert self._child is not None
        assert self._reading is not None
        await self._reading
        assert self._child.returncode is not None
        return self._child.returncode


def agent_process(worker_id: str, nats_url: str, *arguments: str) -> AgentProcess:
    """Return a worker that nobody has started."""
    command = [sys.executable, "-m", "worker_agent", "serve", "--worker-id", worker_id, "--nats-url", nats_url]
    return AgentProcess(worker_id, [*command, *arguments])


async def start_with_fake(process: Process, group: asyncio.TaskGroup, **told: Any) -> None:
    """The process runs where `tensorrt_llm` is the fake, main thread only; `told` as `TENSORRT_LLM_FAKE` has it."""
    await process.start(group, environment(main_thread_only=True, **told))


@asynccontextmanager
async def running_agent(worker_id: str, nats_url: str, *arguments: str, **told: Any) -> AsyncIterator[AgentProcess]:
    """Be where the worker runs; ask it to stop in the end, if it still does."""
    process = agent_process(worker_id, nats_url, *arguments)
    async with asyncio.TaskGroup() as group:
        await start_with_fake(process, group, **told)
        try:
            yield process
        finally:
            await process.end(signal.SIGTERM)
