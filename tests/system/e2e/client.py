"""What end-to-end tests ask of a router, and the barrier by which they wait for the index: sequences, never sleeps."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from bench.processes import FleetProcesses, FleetShape
from kv_runtime.clock import Clock
from tests.system.faults.scraped import Scraped, scrape

MODEL = "sim-8b"
_LOOK_S = 0.02


class Answered(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def worker(self) -> str:
        return self.headers["x-worker-instance-id"]

    @property
    def overlap_blocks(self) -> int:
        return int(self.headers["x-overlap-blocks"])

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


class Client:
    def __init__(self, session: aiohttp.ClientSession, data_url: str, control_url: str) -> None:
        self.session = session
        self.data_url = data_url
        self.control_url = control_url

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answered:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(f"{self.data_url}{path}", headers=headers, **data) as response:
            return Answered(response.status, response.headers.copy(), await response.json())

    async def complete(self, prompt: list[int], max_tokens: int = 8, **headers: str) -> Answered:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.post("/v1/completions", body, named)

    async def control(self, path: str) -> Any:
        async with self.session.get(f"{self.control_url}{path}") as response:
            return await response.json()

    async def base_url(self, worker_id: str) -> str:
        workers = (await self.control("/v1/workers"))["workers"]
        registered = [worker["registration"] for worker in workers]
        return next(str(each["base_url"]) for each in registered if each["worker_id"] == worker_id)

    async def until_index_has(self, worker_id: str) -> None:
        """Return once the index applied all that the worker's engine has flushed so far."""
        async with self.session.get(f"{await self.base_url(worker_id)}/v1/kv/position") as response:
            ranks = (await response.json())["ranks"]
        for rank in ranks:
            query = f"worker={worker_id}&dp_rank={rank['dp_rank']}&epoch={rank['epoch']}&seq={rank['seq']}&timeout_s=30"
            assert await self.control(f"/v1/index/position?{query}") == {"reached": True}

    async def until_journal_is_written(self) -> None:
        """Return once the log has all that the router has recorded so far."""
        shown = await self.scrape()
        wanted = shown.total("journal_records_total") + shown.total("journal_unpublished_records")
        assert wanted, "the router shows no journal"
        while (await self.scrape()).total("journal_records_total") < wanted:
            await Clock().sleep(_LOOK_S)

    async def scrape(self) -> Scraped:
        """Return the router's metrics."""
        return await scrape(self.session, self.control_url)


@asynccontextmanager
async def fleet_of(shape: FleetShape) -> AsyncIterator[tuple[FleetProcesses, Client]]:
    """A fleet of real processes runs; the other is a client of it."""
    async with FleetProcesses(shape) as fleet, aiohttp.ClientSession() as session:
        yield fleet, Client(session, fleet.data_url, fleet.control_url)
