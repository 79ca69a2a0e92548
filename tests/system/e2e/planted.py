"""Workers that a test plays for a real fleet: registered, beating, answering, as far as the fault leaves them to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web

from kv_protocol import fleet, subjects
from kv_protocol.fleet import Heartbeat, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from kv_protocol.load import LoadReport, encode_load
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.http.answers import json_response
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part, run_parts, until

_BEAT_S = 0.2
UNREACHABLE_URL = "http://127.0.0.1:1"


class Planted(NamedTuple):
    """A worker, and the heads by which it beats: instance, epoch, dp_rank."""

    told: WorkerRegistered
    heads: tuple[tuple[str, int, int], ...]
    used_blocks: int = 0


def told(worker_id: str, url: str, model: str = "planted", **changed: Any) -> WorkerRegistered:
    block_size = changed.get("block_size", 16)
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "instance": f"{worker_id}-1",
        "model": model,
        "served_names": (model,),
        "base_url": url,
        "block_size": block_size,
        "hash_scheme": HASH_SCHEME,
        "tokenizer_digest": "t",
        "template_digest": "t",
        "canary": canary(block_size),
        "event_source": "simulated",
    }
    return WorkerRegistered(**fields | changed)


def beating(registration: WorkerRegistered, *, used_blocks: int = 0) -> Planted:
    """Return the worker with a heartbeat for each of its ranks."""
    heads = tuple((registration.instance, 7, dp_rank) for dp_rank in registration.dp_ranks)
    return Planted(registration, heads, used_blocks)


async def announce(log: EventLog, planted: Planted) -> None:
    """Every head of the worker beats once, and its engine reports."""
    model = planted.told.model
    for instance, epoch, dp_rank in planted.heads:
        rank = WorkerRank(planted.told.worker_id, dp_rank)
        beat = Heartbeat(instance=instance, epoch=epoch, last_seq=0)
        await log.announce(subjects.heartbeat(model, rank), fleet.encode(beat))
        report = LoadReport(
            instance=instance,
            iteration=1,
            running_requests=0,
            waiting_requests=0,
            used_blocks=planted.used_blocks,
            total_blocks=1000,
        )
        await log.announce(subjects.load(model, rank), encode_load(report))


@asynccontextmanager
async def in_the_fleet(log: EventLog, workers: Sequence[Planted]) -> AsyncIterator[None]:
    """The workers are registered, and their hearts beat."""
    for each in workers:
        await log.publish(subjects.fleet(each.told.model, each.told.worker_id), fleet.encode(each.told))

    async def beat(stop: asyncio.Event) -> None:
        while not stop.is_set():
            for each in workers:
                await announce(log, each)
            await until(stop, SystemClock().sleep(_BEAT_S))

    async with running(Part("beats", beat)):
        yield


@asynccontextmanager
async def running(part: Part) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_parts([part], stop=stop, drain_s=5.0))
        try:
            yield
        finally:
            stop.set()


@asynccontextmanager
async def http_of_a_worker(*, ill: str = "") -> AsyncIterator[str]:
    """Be where a worker's HTTP answers, and says what is wrong with it."""

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "failed", "reason": ill} if ill else {"status": "ok"}, 503 if ill else 200)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/{worker}/health", health)])
    server = HttpServer(app, "127.0.0.1", 0, drain_s=0.2)
    await server.start()
    async with running(Part("http", server.run)):
        yield f"http://127.0.0.1:{server.port}"
