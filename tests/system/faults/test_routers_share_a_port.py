"""Two routers on one port (`--reuse-port`): one of them stops, again and again, and no client notices.

The clients never repeat a request: an error, a cut and any status but 200 is a lost request.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random

import aiohttp

from bench.processes import free_ports
from kv_runtime.clock import SystemClock
from tests.system.faults.children import Child, Children
from tests.system.faults.nats_servers import NatsServer
from tests.system.integration.http.serving import answered

SEED = 8
REQUESTS = 6_000
STOPS_MIN = 5
KEPT, ONE_EACH = 12, 12
"""Clients that keep their connection, and clients with a connection for each request."""
PAUSE_S_MAX = 0.1
"""Between two requests of a client; every second one follows at once, when the connection of the one before may end."""
ANSWER_TOKENS_MAX = 24
QUIET = ("telemetry.log_level=warning",)


async def until_ready(control_url: str) -> None:
    """Return once the router has a worker that may be sent requests."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{control_url}/ready") as response:
                if response.status == 200:
                    return
            await SystemClock().sleep(0.05)


class Clients:
    """Requests in closed loops, until `REQUESTS` were sent."""

    def __init__(self, port: int, random: Random) -> None:
        self._port, self._random = port, random
        self._left = iter(range(REQUESTS))
        self.answered = 0
        self.lost: list[str] = []

    async def run(self) -> None:
        """Return when all were sent."""
        async with asyncio.TaskGroup() as group:
            for keeps in [True] * KEPT + [False] * ONE_EACH:
                group.create_task(self._loop(keeps=keeps))

    async def _loop(self, *, keeps: bool) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for number in self._left:
            try:
                streams = streams or await asyncio.open_connection("127.0.0.1", self._port)
                streams[1].write(self._request(number))
                answer = await answered(streams[0])
            except (OSError, asyncio.IncompleteReadError) as error:
                self.lost.append(f"request {number}, {'kept' if keeps else 'new'}: {error!r}")
                streams = None
                continue
            if answer.status == 200 and b"error" not in answer.body:
                self.answered += 1
            else:
                self.lost.append(f"request {number}: {answer.status} {answer.body[:200]!r}")
            if not keeps or answer.headers.get("connection") == "close":
                await _closed(streams[1])
                streams = None
            if number % 2:
                await SystemClock().sleep(self._random.random() * PAUSE_S_MAX)
        if streams is not None:
            await _closed(streams[1])

    def _request(self, number: int) -> bytes:
        stream = "true" if number % 3 else "false"
        tokens = self._random.randint(1, ANSWER_TOKENS_MAX)
        body = f'{{"model":"m","prompt":"request {number}","max_tokens":{tokens},"stream":{stream}}}'.encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_of_two_routers_on_one_port_one_stops_and_no_request_is_lost(tmp_path: Path) -> None:
    random = Random(SEED)
    nats_port, port = free_ports(2)
    async with Children() as children:
        server = NatsServer(children, tmp_path / "n0", nats_port)
        await server.start(None)

        async def router(name: str) -> Child:
            shared = ("--reuse-port", "--port", str(port), "--control-port", "0", "--nats-url", server.url)
            return await children.start_ours(name, "router", *shared, ready="control plane", settings=QUIET)

        worker = ("worker_agent", "serve", "--worker-id", "w0", "--model", "m", "--nats-url", server.url)
        await children.start_ours("w0", *worker, ready="worker w0 on", settings=("engine.speed=2", *QUIET))
        routers = [await router("a"), await router("b")]
        for each in routers:
            await until_ready((await each.line_with("control plane")).split()[2])
        clients, stops = Clients(port, random), 0
        sending = asyncio.ensure_future(clients.run())
        while not sending.done():
            await SystemClock().sleep(0.3 + random.random())
            stopped = routers.pop(0)
            await stopped.end()
            stops += 1
            routers.append(await router(f"{stopped.name[0]}{stops}"))
        await sending
        assert clients.lost == []
        assert clients.answered == REQUESTS
        assert stops >= STOPS_MIN
