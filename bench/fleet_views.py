"""`router bench fleet-views`: what the control plane's views of a large fleet cost, and for how long they hold it up.

One process has a router's state, an index (shared system prompts, and sessions that fork from them) and a control plane
on a socket. A client in another process asks each endpoint. Meanwhile the first one matches a prompt each millisecond
on its event loop: the longest pause between two matches, and the longest match, are what a view costs requests.
"""

import asyncio
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from time import perf_counter
from typing import Any, NamedTuple, cast
from urllib.request import urlopen

import click
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from bench.decision.fleet import DecisionFleet, DecisionShape
from bench.report import machine_line, percentile
from indexer.embedded import EmbeddedIndex, PassedRequest, tree_routes
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import BatchArrived
from indexer.service.prefix_explorer import PrefixExplorer
from kv_protocol.events import Batch, Stored
from kv_runtime.clock import SystemClock
from kv_runtime.http.server import HttpServer
from router.admin.control_plane import ControlPlane
from router.live.decision_rows import TailOfDecisions
from router.live.routes import LiveRoutes
from router.live.service import Live

_SYSTEMS, _SYSTEM_BLOCKS, _SESSION_BLOCKS = 10, 64, 100
_TICK_S = 0.001
_MS = 1000.0
PATHS = (
    "/v1/prefix-tree",
    "/v1/prefix-tree?order_by=heat&limit=50",
    "/v1/prefix-tree?behind={trunk}&limit=50",
    "/v1/prefix-tree?behind={trunk}&limit=200&ranks=64",
    "/v1/fleet",
    "/v1/fleet?at={kept}",
    "/v1/history",
    "/v1/decisions?limit=50",
    "/v1/predictions",
)


class Cell(NamedTuple):
    """One endpoint: answers, and what the process suffered meanwhile. Milliseconds."""

    path: str
    p50_ms: float
    max_ms: float
    answer_bytes: int
    pause_max_ms: float
    match_max_ms: float


class Process:
    """The process that is measured."""

    def __init__(self, ranks: int, blocks: int, seed: int) -> None:
        self.fleet = DecisionFleet(DecisionShape(ranks, 64, in_flight=1), seed)
        self.fold = self.fleet.index
        random = Random(seed)  # noqa: S311 - a workload, not a secret
        systems = [_chain(random, _SYSTEM_BLOCKS) for _ in range(_SYSTEMS)]
        self.ends = list(_fill(self.fold, random, systems, blocks))
        self.trunk, self.prompt = systems[0][-1], b"".join(each.to_bytes(8, "little") for each in systems[0])
        clock, index = SystemClock(), cast("EmbeddedIndex", self.fold)  # which has what is asked of it
        tail = TailOfDecisions(self.fleet.routing)
        self.live = Live(self.fleet.routing, index, clock, tail)
        explorer = PrefixExplorer(self.fold, clock, heat=self._heat)
        log: Any = None
        plane = ControlPlane(
            self.fleet.routing, None, log, watched=[*LiveRoutes(self.live, clock).routes(), *tree_routes(explorer)]
        )
        self.server = HttpServer(plane.app(CollectorRegistry(), token=""), "127.0.0.1", 0)

    async def _heat(self) -> list[PassedRequest]:
        now_s = SystemClock().now()
        return [PassedRequest(end, 0.5, now_s) for end in self.ends[-8192:]]

    async def measure(self, asked: int) -> list[Cell]:
        """Return a cell for each endpoint."""
        await self.server.start()
        await self.live.keep()
        assert self.live.ring.span is not None
        places = {"trunk": self.trunk, "kept": self.live.ring.span[1] + 1}
        return [await self._cell(path.format(**places), path, asked) for path in PATHS]

    async def _cell(self, path: str, name: str, asked: int) -> Cell:
        here, there = get_context("spawn").Pipe()
        url = f"http://127.0.0.1:{self.server.port}{path}"
        client = get_context("spawn").Process(target=ask, args=(there, url, asked), daemon=True)
        client.start()
        pauses, matches = [0.0], [0.0]
        await asyncio.to_thread(here.recv)  # it has begun
        last_s = perf_counter()
        while not here.poll():
            began_s = perf_counter()
            pauses.append(began_s - last_s - _TICK_S)
            self.fold.overlap(self.prompt, ())
            matches.append(perf_counter() - began_s)
            last_s = perf_counter()
            await asyncio.sleep(_TICK_S)
        took, size = here.recv()
        client.join()
        return Cell(name, percentile(took, 0.5) * _MS, max(took) * _MS, size, max(pauses) * _MS, max(matches) * _MS)


def ask(told: Connection, url: str, asked: int) -> None:
    """Ask so many times, one after the other; tell how long answers took, and the size of the last."""
    told.send("begun")
    took: list[float] = []
    body = b""
    for _ in range(asked):
        began_s = perf_counter()
        with urlopen(url) as response:  # noqa: S310 - our own server
            body = response.read()
        took.append(perf_counter() - began_s)
    told.send((took, len(body)))


def _chain(random: Random, blocks: int) -> list[int]:
    return [random.getrandbits(63) for _ in range(blocks)]


def _fill(fold: IndexFold, random: Random, systems: list[list[int]], blocks: int) -> Iterable[int]:
    """Let sessions behind the systems be stored at one to four ranks each; yield their last blocks."""
    known = fold.ranks()
    seqs = dict.fromkeys(known, 0)
    while fold.block_count() < blocks:
        chain = [*random.choice(systems), *_chain(random, random.randint(20, 2 * _SESSION_BLOCKS - 20))]
        for _ in range(random.randint(1, 4)):
            rank = random.choice(known)
            seq = seqs[rank] = (seqs[rank] or fold.overlap((), [rank])[0].seq) + 1
            stored = Stored(tuple(chain[: random.randint(_SYSTEM_BLOCKS, len(chain))]))
            fold.apply(BatchArrived(rank, Batch(1, seq, stored)), random.random())
        yield chain[-1]


@click.command()
@click.option("--ranks", default=1000, show_default=True)
@click.option("--blocks", default=1_000_000, show_default=True)
@click.option("--asked", default=20, show_default=True, help="how often each endpoint is asked")
@click.option("--seed", default=1, show_default=True)
def fleet_views(ranks: int, blocks: int, asked: int, seed: int) -> None:
    """Measure the control plane's views of a large fleet, and what they cost requests."""
    console = Console(width=140)
    process = Process(ranks, blocks, seed)
    cells = asyncio.run(process.measure(asked))
    table = Table("endpoint", "p50 ms", "max ms", "bytes", "longest pause of the loop, ms", "longest match, ms")
    for cell in cells:
        table.add_row(
            cell.path,
            *(f"{each:.1f}" for each in cell[1:3]),
            str(cell.answer_bytes),
            *(f"{each:.1f}" for each in cell[4:]),
        )
    console.print(table)
    console.print(f"{ranks} ranks, {process.fold.block_count()} blocks, seed {seed}. {machine_line()}")
