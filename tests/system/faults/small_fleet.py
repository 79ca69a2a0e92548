"""A router with settings of the test's own and a few slow workers, on a nats-server.

async with running(directory, 2, ("failures.first_byte_s=1",), ()) as fleet:  await fleet.answer("hello")
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from bench.ports import free_ports
from kv_runtime.clock import SystemClock
from tests.system.faults.children import Child, Children
from tests.system.faults.nats_servers import NatsServer
from tests.system.faults.scraped import scrape

MODEL = "m"
SOON_S = 20.0
_LOOK_S = 0.05
_QUIET = "telemetry.log_level=error"


class Running(NamedTuple):
    """The processes, and their addresses."""

    nats_url: str
    data_url: str
    control_url: str
    session: aiohttp.ClientSession
    workers: list[Child]

    async def answer(self, prompt: str, **changed: Any) -> tuple[int, bytes]:
        """Return the status and the body of an answer, of two tokens if the test does not say otherwise."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2} | changed
        async with self.session.post(f"{self.data_url}/v1/completions", json=body) as response:
            return response.status, await response.read()

    async def choose_by(self, mode: str) -> int:
        """Return the status with which the router took another mode."""
        async with self.session.patch(f"{self.control_url}/v1/policy", json={"mode": mode}) as response:
            return response.status

    async def total(self, metric: str) -> float:
        """Return a metric of the router, over all labels."""
        return (await scrape(self.session, self.control_url)).total(metric)

    async def until(self, metric: str, value: float) -> None:
        """Return once a metric of the router, over all labels, has this value."""
        async with asyncio.timeout(SOON_S):
            while await self.total(metric) != value:
                await SystemClock().sleep(_LOOK_S)


@asynccontextmanager
async def running(
    directory: Path, workers: int | tuple[str, ...], settings: tuple[str, ...], worker_settings: tuple[str, ...]
) -> AsyncIterator[Running]:
    """Everything runs and is fit; when it is over the router runs still, whatever it said.

    `workers` are so many that serve whole requests, or the role of each; they are called w0, w1, ...
    """
    roles = ("aggregated",) * workers if isinstance(workers, int) else workers
    timeout = aiohttp.ClientTimeout(total=SOON_S)
    async with Children() as children, aiohttp.ClientSession(timeout=timeout) as session:
        server = NatsServer(children, directory / "n0", free_ports(1)[0])
        await server.start()
        data, control = free_ports(2)
        ports = ("--port", str(data), "--control-port", str(control), "--nats-url", server.url)
        router = await children.start_ours(
            "router", "router", *ports, ready="control plane", settings=(_QUIET, *settings)
        )
        fleet = [
            await children.start_ours(
                worker,
                *("worker_agent", "serve", "--worker-id", worker, "--model", MODEL, "--nats-url", server.url),
                ready=f"worker {worker} on",
                settings=(_QUIET, f"worker.role={role}", *worker_settings),
            )
            for worker, role in ((f"w{number}", role) for number, role in enumerate(roles))
        ]
        found = Running(server.url, f"http://127.0.0.1:{data}", f"http://127.0.0.1:{control}", session, fleet)
        await found.until("rank_fit", len(roles))
        yield found
        assert router.is_running
        router.forget_output()  # a test may be about what it says with a traceback
