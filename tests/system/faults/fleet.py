"""`bench`'s fleet with a stand-alone index and a nats-server of its own, to which a test does what it wants.

async with fleet() as running, running.traffic() as sent:
    await running.stop("nats-0", SIGKILL);  await running.start_again("nats-0");  await running.until_equal(10.0)
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from types import TracebackType

import aiohttp

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from kv_protocol.ids import WorkerRank
from tests.system.faults.nats_servers import Limits, configure
from tests.system.faults.proof import until_equal
from tests.system.faults.scraped import Scraped, scrape
from tests.system.faults.stream_reader import Stored, holes, stored_in
from tests.system.faults.traffic import BLOCK_TOKENS, MODEL, Traffic, TrafficShape, traffic
from tests.system.integration.broker import eventually

READY_S = 30.0
"""For processes to start and to know of each other."""
PUBLISHED_S = 10.0
"""The longest pause between two attempts, and what the server needs to find itself."""
QUIET = ("telemetry.log_level=warning",)
WORKER = (f"engine.block_size={BLOCK_TOKENS}", "engine.speed=50", *QUIET)
SMALL_CACHE = ("engine.total_kv_blocks=96", "engine.max_seq_len=1024")
"""Three times as much as the longest request needs, and less than the traffic's common beginnings and answers."""
SHAPE = FleetShape(workers=3, nats_servers=1, worker_settings=(*WORKER, *SMALL_CACHE), router_settings=QUIET)
_REQUESTS = TrafficShape()
_COMPLAINTS = ("Traceback (most recent call last)", "panic:")
_SHOWN_CHARACTERS = 3000


def freeze(process: ChildProcess) -> None:
    """It stands still: its sockets stay open, and nothing is read or said."""
    os.kill(process.pid, SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def thaw(process: ChildProcess) -> None:
    os.kill(process.pid, SIGCONT)


class Fleet(FleetProcesses):
    """The processes. Leaving the block kills them, and fails for one that ended uninvited or complained.

    All are told of the first nats-server, from which they learn of others; the test may ask all of them.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        shape: FleetShape = SHAPE,
        requests: TrafficShape = _REQUESTS,
        index_settings: tuple[str, ...] = (),
        limits: Limits | None = None,
    ) -> None:
        super().__init__(shape)
        at = self.router.command.index("--nats-url") + 1
        self.nats_urls = self.router.command[at].split(",")
        self.router.command[at] = self.nats_urls[0]
        for server in self.nats_servers.values():
            configure(server, limits or Limits())
        self.session, self._requests, self._index_settings = session, requests, index_settings
        self.index_urls: dict[str, str] = {}
        self._indexes: dict[str, ChildProcess] = {}
        self._stopped = set[str]()

    @property
    def all(self) -> dict[str, ChildProcess]:
        """Every process by its name."""
        return {**super().all, **self._indexes}

    @property
    def urls(self) -> dict[str, str]:
        """Where each process shows its metrics."""
        return {"router": self.control_url, **self.index_urls, **self.worker_urls}

    @property
    def worker_ids(self) -> list[str]:
        return list(self.shape.roles)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        every = self.all.items()
        complaints = [f"{name} ended" for name, each in every if not each.is_running and name not in self._stopped]
        complaints += [f"{name}: {words}" for name, each in every for words in _COMPLAINTS if words in each.output]
        said = "\n".join(f"---- {name}\n{each.output[-_SHOWN_CHARACTERS:]}" for name, each in every)
        await asyncio.gather(*(each.end(SIGKILL) for _, each in every))
        await super().__aexit__(None, None, None)
        if error is not None:
            error.add_note(said)
        else:
            assert complaints == [], said

    def traffic(self) -> AbstractAsyncContextManager[Traffic]:
        """Requests are sent to the router while the block runs."""
        return traffic(self.data_url, self._requests)

    async def start_index(self, name: str, *, nats_url: str = "", port: int = 0) -> None:
        """A stand-alone index listens; `until_equal` asks it, too. `port` 0: any free one."""
        command = ["-m", "indexer", "serve", "--port", str(port), "--nats-url", nats_url or self.nats_urls[0]]
        assigned = [part for setting in (*QUIET, *self._index_settings) for part in ("--set", setting)]
        index = self._indexes[name] = ChildProcess(name, [sys.executable, *command, *assigned])
        await index.start(self._group)
        self.index_urls[name] = (await index.line_with("index on")).split()[-1]

    async def stop(self, name: str, number: Signals = SIGTERM) -> None:
        """End a process, also one that stands still."""
        self._stopped.add(name)
        thaw(self.all[name])
        await self.all[name].end(number)

    async def kill(self, worker_id: str) -> None:
        """The worker is gone without a word."""
        await self.stop(worker_id, SIGKILL)

    async def until_retired(self, name: str) -> None:
        """Return when a nats-server that retires has shut out the last of its clients, and ended."""
        self._stopped.add(name)
        await self.all[name].until_ended()

    async def start_again(self, name: str) -> None:
        """Start a process that ended, as the base does; it may not end unnoticed any more."""
        self._stopped.discard(name)
        await super().start_again(name)

    async def until_promised(self, worker_id: str) -> None:
        """Return once the router has given the worker requests that are not over."""

        async def is_promised() -> bool:
            return (await self.scrape("router")).total("ledger_active_requests", worker=worker_id) > 0

        await eventually(is_promised, timeout_s=READY_S)

    async def until_equal(self, within_s: float, *, moved: bool = True, only: Sequence[str] = ()) -> None:
        """Return once every index (of those in `only`) was proven equal to the mirrors of all ranks.

        With `moved` every rank is proven by what came to its mirror after this call.
        """
        indexes = {"router": self.control_url, **self.index_urls}
        asked = {name: url for name, url in indexes.items() if not only or name in only}
        ranks = [WorkerRank(worker_id, 0) for worker_id in self.worker_ids]
        await until_equal(self.nats_urls, asked, MODEL, ranks, within_s=within_s, moved=moved)

    async def until_published(self, within_s: float) -> None:
        """Return once the log took all that the workers have for it; with traffic there is always something new."""

        async def is_published() -> bool:
            return not any(await self.totals("outbox_bytes", *self.worker_ids))

        await eventually(is_published, timeout_s=within_s)

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
async def fleet(
    shape: FleetShape = SHAPE,
    requests: TrafficShape = _REQUESTS,
    index_settings: tuple[str, ...] = (),
    limits: Limits | None = None,
) -> AsyncIterator[Fleet]:
    """Be where all runs; `index_settings` are the index's, `limits` those of the nats-servers at first."""
    async with (
        aiohttp.ClientSession() as session,
        Fleet(session, shape, requests, index_settings, limits) as running,
    ):
        await running.start_index("index")
        yield running
