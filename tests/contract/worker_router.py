"""A real router on the ground's log, as a process, and what is asked of it."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from bench.processes import ChildProcess
from kv_runtime.clock import Clock
from tests.contract.workers import WAIT_S, Ground, Worker, post
from tests.support.processes import running
from tests.system.integration.agent_http import Answered


class Router(NamedTuple):
    """A router on the ground's log."""

    ground: Ground
    data_url: str
    control_url: str

    async def ask(self, worker: Worker, path: str, asked: dict[str, Any]) -> Answered:
        """Return what a client of the router gets from the worker's model, without the comments of an event stream."""
        answered = await post(self.ground.session, self.data_url + path, worker.greedy(asked))
        return replace(answered, data=re.sub(rb"(?m)^:.*\n", b"", answered.data))

    async def until_fit(self, *awaited: Worker) -> None:
        """Return once the router counts on these workers."""
        names = {worker.worker_id for worker in awaited}

        async def are_fit() -> bool:
            return names <= {name for name, unfit in (await self._known()).items() if not unfit}

        await until(are_fit, f"{names} fit")

    async def _known(self) -> dict[str, Any]:
        async with self.ground.session.get(f"{self.control_url}/v1/workers") as response:
            known = (await response.json())["workers"]
        return {each["registration"]["worker_id"]: each["unfit"] for each in known}


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return once what another process is asked is so: there is nothing to wait on."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not await holds():
                await Clock().sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S} s: {what}") from None


@asynccontextmanager
async def routing(ground: Ground, text: str) -> AsyncIterator[Router]:
    """Be where a router in mode kv runs."""
    command = [sys.executable, "-m", "router", "--mode", "kv", "--port", "0", "--control-port", "0"]
    place = ("--nats-url", ground.nats_url, "--text", text, "--set", "telemetry.log_level=warning")
    process = ChildProcess("router", [*command, *place])
    async with running(process):
        data_url = (await process.line_with("router on")).split()[2]
        yield Router(ground, data_url, (await process.line_with("control plane")).split()[2])
    assert "Traceback" not in process.output
