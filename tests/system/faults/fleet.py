"""A fleet on a nats-server of the test's own: a router, a stand-alone index, simulated workers with small caches.

async with fleet_on_one_server(directory) as (server, running), running.traffic() as sent:
    await server.kill();  await server.start();  await running.until_equal(10.0)
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp

from bench.processes import free_ports
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from tests.system.faults.children import Child, Children
from tests.system.faults.nats_servers import Limits, NatsServer, nats_servers
from tests.system.faults.proof import until_equal
from tests.system.faults.scraped import Scraped, scrape
from tests.system.faults.stream_reader import Stored, holes, stored_in
from tests.system.faults.traffic import BLOCK_TOKENS, MODEL, Traffic, TrafficShape, traffic

READY_S = 30.0
"""For processes to start and to know of each other."""
PUBLISHED_S = 10.0
"""The longest pause between two attempts, and what the server needs to find itself."""
_LOOK_S = 0.05
_QUIET = "telemetry.log_level=warning"
_WORKER = (f"engine.block_size={BLOCK_TOKENS}", "engine.speed=50", _QUIET)
SMALL_CACHE = ("engine.total_kv_blocks=96", "engine.max_seq_len=1024")
"""Three times as much as the longest request needs, and less than the traffic's common beginnings and answers."""


class Shape(NamedTuple):
    """What to start, and how: `section.key=value` assignments."""

    workers: int = 3
    worker_settings: tuple[str, ...] = SMALL_CACHE
    nats_settings: tuple[str, ...] = ()
    """For those that make the streams: the router and the index."""
    requests: TrafficShape = TrafficShape()
    router_settings: tuple[str, ...] = ()


class Fleet:
    """The processes, between entering and leaving `fleet`."""

    def __init__(
        self, children: Children, session: aiohttp.ClientSession, nats_urls: Sequence[str], shape: Shape
    ) -> None:
        self._children, self._shape, self.session = children, shape, session
        self.nats_urls = nats_urls
        self._data_port, self._control_port = free_ports(2)
        self.processes: dict[str, Child] = {}
        self.urls: dict[str, str] = {}
        self.ranks: list[WorkerRank] = []
        self.indexes: dict[str, str] = {}
        """The URLs of what `until_equal` asks."""

    @property
    def data_url(self) -> str:
        return f"http://127.0.0.1:{self._data_port}"

    @property
    def worker_ids(self) -> list[str]:
        return [f"w{number}" for number in range(self._shape.workers)]

    def traffic(self) -> AbstractAsyncContextManager[Traffic]:
        """Requests are sent to the router while the block runs."""
        return traffic(self.data_url, self._shape.requests)

    async def start(self) -> None:
        """All processes run, and know of each other."""
        await self.start_router()
        workers = [self.start_worker(worker_id) for worker_id in self.worker_ids]
        await asyncio.gather(self.start_index("index"), *workers)
        await self.until_ready()

    async def start_router(self) -> None:
        """The router listens, on the ports that it always has."""
        ports = ("--port", str(self._data_port), "--control-port", str(self._control_port))
        router = ("router", "--mode", "kv", *ports, "--nats-url", self.nats_urls[0])
        settings = (_QUIET, *self._shape.nats_settings, *self._shape.router_settings)
        await self._start("router", *router, ready="control plane", settings=settings)
        self.urls["router"] = self.indexes["router"] = f"http://127.0.0.1:{self._control_port}"

    async def start_index(self, name: str, *, nats_url: str = "", port: int = 0) -> None:
        """A stand-alone index listens; `until_equal` asks it, too. `port` 0: any free one."""
        index = ("indexer", "serve", "--port", str(port), "--nats-url", nats_url or self.nats_urls[0])
        line = await self._start(name, *index, ready="index on", settings=(_QUIET, *self._shape.nats_settings))
        self.urls[name] = self.indexes[name] = line.split()[-1]

    async def start_worker(self, worker_id: str, model: str = MODEL, settings: tuple[str, ...] = ()) -> None:
        """The worker serves; the router may not know of it yet. `settings` are further ones."""
        worker = ("worker_agent", "serve", "--worker-id", worker_id, "--model", model, "--nats-url", self.nats_urls[0])
        settings = (*_WORKER, *self._shape.worker_settings, *settings)
        line = await self._start(worker_id, *worker, ready=f"worker {worker_id} on", settings=settings)
        self.urls[worker_id] = line.split()[-1]
        rank = WorkerRank(worker_id, 0)
        if rank not in self.ranks:
            self.ranks.append(rank)

    async def _start(self, name: str, *arguments: str, ready: str, settings: tuple[str, ...]) -> str:
        child = self.processes[name] = await self._children.start_ours(name, *arguments, ready=ready, settings=settings)
        return await child.line_with(ready)

    async def kill(self, name: str) -> None:
        """One of the processes is gone without a word."""
        await self.processes[name].kill()

    async def until_promised(self, worker_id: str) -> None:
        """Return once the router has given the worker requests that are not over."""
        async with asyncio.timeout(READY_S):
            while not (await self.scrape("router")).total("ledger_active_requests", worker=worker_id):
                await Clock().sleep(_LOOK_S)

    async def until_ready(self, within_s: float = READY_S) -> None:
        """Return once the router has a place for every request, and believes all that it knows."""
        for _ in range(round(within_s / _LOOK_S)):
            found = await self._unready()
            if not found:
                return
            await Clock().sleep(_LOOK_S)
        raise AssertionError(f"not ready within {within_s} s: {found}")

    async def _unready(self) -> str:
        async with self.session.get(f"{self.urls['router']}/v1/workers") as response:
            workers = (await response.json())["workers"]
        fit = [worker["registration"]["worker_id"] for worker in workers if not worker["unfit"]]
        async with self.session.get(f"{self.data_url}/ready") as response:
            found = await response.text()
            is_ready = response.status == 200 and set(self.worker_ids) <= set(fit)
            return "" if is_ready else f"{fit} are fit, {found}"

    async def until_equal(self, within_s: float, *, moved: bool = True, only: Sequence[str] = ()) -> None:
        """Return once every index (of those in `only`) was proven equal to the mirrors of all ranks.

        With `moved` every rank is proven by what came to its mirror after this call.
        """
        indexes = {name: url for name, url in self.indexes.items() if not only or name in only}
        await until_equal(self.nats_urls, indexes, MODEL, self.ranks, within_s=within_s, moved=moved)

    async def until_published(self, within_s: float) -> None:
        """Return once the log took all that the workers have for it; with traffic there is always something new."""
        for _ in range(round(within_s / _LOOK_S)):
            waiting = await self.totals("outbox_bytes", *self.worker_ids)
            if not any(waiting):
                return
            await Clock().sleep(_LOOK_S)
        raise AssertionError(f"not published within {within_s} s: {waiting} bytes")

    async def nothing_is_lost(self, kept: list[Stored]) -> None:
        """Expect in the log what it had, and, once all is published, everything else that was numbered."""
        await self.until_published(PUBLISHED_S)
        stored = await stored_in(self.nats_urls)
        assert set(kept) <= set(stored)
        assert holes(stored) == {}

    async def scrape(self, name: str) -> Scraped:
        """Return the metrics of one process."""
        return await scrape(self.session, self.urls[name])

    async def totals(self, metric: str, *names: str) -> list[float]:
        """Return what each of these processes says of a metric, over all labels."""
        return [(await self.scrape(name)).total(metric) for name in names]


@asynccontextmanager
async def fleet(children: Children, nats_urls: Sequence[str], shape: Shape | None = None) -> AsyncIterator[Fleet]:
    """Everything runs; `children` outlive it. The fleet is told of the first server, the test may ask all of them."""
    async with aiohttp.ClientSession() as session:
        running = Fleet(children, session, nats_urls, shape or Shape())
        await running.start()
        yield running


@asynccontextmanager
async def fleet_on_one_server(
    directory: Path, shape: Shape | None = None, limits: Limits | None = None
) -> AsyncIterator[tuple[NatsServer, Fleet]]:
    """A server and a fleet that has no other."""
    async with Children() as children:
        (server,) = nats_servers(children, directory)
        await server.start(limits)
        async with fleet(children, [server.url], shape) as running:
            yield server, running
