"""Two routers on one port (`--reuse-port`): one of them stops, again and again, and no client notices.

The clients never repeat a request: an error, a cut and any status but 200 is a lost request.
"""

import asyncio
import sys
from contextlib import AsyncExitStack
from random import Random

import aiohttp

from bench.processes import ChildProcess, free_ports
from kv_runtime.clock import Clock
from tests.support.processes import agent_process, running
from tests.system.integration.broker import Broker

SEED = 8
REQUESTS = 6_000
STOPS_MIN = 5
KEPT, ONE_EACH = 12, 12
"""Clients that keep their connection, and clients with a connection for each request."""
PAUSE_S_MAX = 0.1
"""Between two requests of a client; every second one follows at once, when the connection of the one before may end."""
ANSWER_TOKENS_MAX = 24
QUIET = ("--set", "telemetry.log_level=warning")


async def until_ready(control_url: str) -> None:
    """Return once the router has a worker that may be sent requests."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{control_url}/ready") as response:
                if response.status == 200:
                    return
            await Clock().sleep(0.05)


class Clients:
    """Requests in closed loops, until `REQUESTS` were sent."""

    def __init__(self, port: int, random: Random) -> None:
        self._url, self._random = f"http://127.0.0.1:{port}/v1/completions", random
        self._left = iter(range(REQUESTS))
        self.answered = 0
        self.lost: list[str] = []

    async def run(self) -> None:
        """Return when all were sent."""
        async with asyncio.TaskGroup() as group:
            for keeps in [True] * KEPT + [False] * ONE_EACH:
                group.create_task(self._loop(keeps=keeps))

    async def _loop(self, *, keeps: bool) -> None:
        connector = aiohttp.TCPConnector(limit=1, force_close=not keeps)
        async with aiohttp.ClientSession(connector=connector) as session:
            for number in self._left:
                try:
                    async with session.post(self._url, json=self._body(number)) as response:
                        status, body = response.status, await response.read()
                except aiohttp.ClientError as error:
                    status, body = 0, repr(error).encode()
                if status == 200 and b"error" not in body:
                    self.answered += 1
                else:
                    self.lost.append(f"request {number}, {'kept' if keeps else 'new'}: {status} {body[:200]!r}")
                if number % 2:
                    await Clock().sleep(self._random.random() * PAUSE_S_MAX)

    def _body(self, number: int) -> dict[str, object]:
        tokens = self._random.randint(1, ANSWER_TOKENS_MAX)
        return {"model": "m", "prompt": f"request {number}", "max_tokens": tokens, "stream": bool(number % 3)}


async def test_of_two_routers_on_one_port_one_stops_and_no_request_is_lost(broker: Broker) -> None:
    random = Random(SEED)
    (port,) = free_ports(1)
    async with AsyncExitStack() as cleanup:

        async def router(name: str) -> ChildProcess:
            shared = ("--reuse-port", "--port", f"{port}", "--control-port", "0", "--nats-url", broker.url)
            command = [sys.executable, "-m", "router", *shared, *QUIET]
            process = await cleanup.enter_async_context(running(ChildProcess(name, command)))
            await process.line_with("control plane")
            return process

        worker = agent_process("w0", broker.url, "--model", "m", "--set", "engine.speed=2", *QUIET)
        await (await cleanup.enter_async_context(running(worker))).line_with("worker w0 on")
        routers = [await router("a"), await router("b")]
        for each in routers:
            await until_ready((await each.line_with("control plane")).split()[2])
        clients, stopped = Clients(port, random), list[ChildProcess]()
        sending = asyncio.ensure_future(clients.run())
        while not sending.done():
            await Clock().sleep(0.3 + random.random())
            stopped.append(routers.pop(0))
            await stopped[-1].end()
            routers.append(await router(f"{stopped[-1].name[0]}{len(stopped)}"))
        await sending
    assert clients.lost == []
    assert clients.answered == REQUESTS
    assert len(stopped) >= STOPS_MIN
    assert not any("Traceback" in each.output for each in (*stopped, *routers, worker))
