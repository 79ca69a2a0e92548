"""Whole workers, whatever their kind, as the fleet and their clients see them: no assertion here knows which it has.

    what of a worker           seen at
    ------------------------   --------------------------------------------------------------
    its place in the fleet     `kv.v1.fleet.>`, a real nats-server's
    its pulse, its load        `kv.v1.heartbeat.>`, `kv.v1.load.>`
    what its caches hold       an index that follows its streams; the digests of its mirror in its heartbeats
    its answers                the address that it registered
    its figures                `/metrics` at `status_url`

Kinds of workers: `worker_kinds.py`.
"""

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from indexer.embedded import EmbeddedIndex
from kv_protocol import fleet, load, subjects
from kv_protocol.events import TIERS
from kv_protocol.fleet import FleetEvent, Heartbeat, WorkerRegistered
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_protocol.load import LoadReport
from kv_runtime.event_log import EventLog, LogMessage
from tests.support.trtllm import Fake, installed
from tests.system.integration.agent_http import COMPLETIONS, Answered
from tests.system.integration.broker import eventually, running_broker
from tests.system.integration.event_path import connected, running_index

WAIT_S = float(os.environ.get("KV_CONTRACT_WAIT_S", "30"))
"""How long what must come is waited for; planted bugs wait less."""
PROMPT_BLOCKS = 5
JSON = {"Content-Type": "application/json"}
_LEFT = 200
"""Tokens of the longest request that are left to its prompt."""
_seeds = count(1)


async def comes(holds: Callable[[], object], what: str) -> None:
    """Return once `holds()` is true; fail where that does not come."""
    await eventually(holds, what, WAIT_S)


@dataclass
class Heard:
    """What all workers told so far; of pulses the newest."""

    fleet: dict[str, list[FleetEvent]] = field(default_factory=lambda: defaultdict(list))
    beats: dict[WorkerRank, Heartbeat] = field(default_factory=dict)
    loads: dict[WorkerRank, list[LoadReport]] = field(default_factory=lambda: defaultdict(list))

    async def listen(self, log: EventLog) -> None:
        """Everything from now on is heard."""
        await log.listen(subjects.FLEET_ALL, self._on_fleet)
        await log.listen(subjects.HEARTBEAT_ALL, self._on_beat)
        await log.listen(subjects.LOAD_ALL, self._on_load)

    async def _on_fleet(self, message: LogMessage) -> None:
        event = fleet.decode_fleet_event(message.data)
        self.fleet[event.worker_id].append(event)

    async def _on_beat(self, message: LogMessage) -> None:
        self.beats[subjects.rank_of(message.subject)] = fleet.decode_heartbeat(message.data)

    async def _on_load(self, message: LogMessage) -> None:
        self.loads[subjects.rank_of(message.subject)].append(load.decode_load(message.data))


@dataclass
class Ground:
    """Where workers live: an event log, an index on it, and ears; and the fake package, which is installed."""

    nats_url: str
    index: EmbeddedIndex
    heard: Heard
    session: aiohttp.ClientSession
    fake: Fake
    _names: Any = field(default_factory=lambda: count(1))

    def name(self, kind: str) -> str:
        """Return a worker id that no worker has had."""
        return f"{kind}-{next(self._names)}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ground(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """Give a module's tests one ground; they import it by name."""
    switch_s = sys.getswitchinterval()
    with installed() as fake:
        async with (
            running_broker(tmp_path_factory.mktemp("log") / "store") as broker,
            running_index(broker.url) as index,
            connected(broker.url) as log,
            aiohttp.ClientSession() as session,
        ):
            heard = Heard()
            await heard.listen(log)
            yield Ground(broker.url, index, heard, session, fake)
    sys.setswitchinterval(switch_s)


class Stream:
    """An answer on its way."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.data = b""

    async def first(self) -> None:
        """Return once the answer has begun."""
        self.data += await self.response.content.readuntil(b"\n\n")

    async def rest(self) -> bool:
        """Read to the end; return whether the answer was whole as HTTP goes."""
        try:
            async for part in self.response.content.iter_any():
                self.data += part
        except (aiohttp.ClientPayloadError, ConnectionError):
            return False
        return True

    @property
    def is_done(self) -> bool:
        """Whether it ended as a whole answer does."""
        return self.data.endswith(b"data: [DONE]\n\n") and b'"error"' not in self.data


@dataclass
class Worker:
    """A worker that runs. `kill` ends its engine at once; `ending` has the reason why the worker ended by itself."""

    ground: Ground
    worker_id: str
    model: str
    status_url: str
    stop: Callable[[], None]
    kill: Callable[[], Awaitable[None]]
    ending: asyncio.Task[str]

    @property
    def told(self) -> list[FleetEvent]:
        """What the fleet was told of it, in order."""
        return self.ground.heard.fleet[self.worker_id]

    @property
    def registration(self) -> WorkerRegistered:
        """What it is, by its own word."""
        return next(event for event in reversed(self.told) if isinstance(event, WorkerRegistered))

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        return self.registration.ranks

    def fresh_prompt(self) -> list[int]:
        """Return a prompt that no request had before: whole blocks, and one more token, which is always computed."""
        seed = next(_seeds)
        return [(seed * 31 + at * at * seed + at) % 96 + 32 for at in range(PROMPT_BLOCKS * self.block_size + 1)]

    @property
    def long(self) -> int:
        """How many tokens an answer has that goes on until it is ended from outside."""
        return self.registration.max_seq_len - _LEFT

    @property
    def block_size(self) -> int:
        return self.registration.block_size

    def greedy(self, asked: dict[str, Any]) -> bytes:
        """Return a generation's request as it is sent: of this model, whose answer is the same each time."""
        return json.dumps({"model": self.model, "temperature": 0, **asked}).encode()

    async def ask(self, path: str, asked: dict[str, Any], **headers: str) -> Answered:
        """Return the whole of what the worker answers to a generation's request."""
        return await post(self.ground.session, self.registration.base_url + path, self.greedy(asked), **headers)

    @asynccontextmanager
    async def open(self, asked: dict[str, Any]) -> AsyncIterator[Stream]:
        """Be where a stream has begun; leaving, its client goes."""
        url, data = self.registration.base_url + COMPLETIONS, self.greedy({**asked, "stream": True})
        async with self.ground.session.post(url, data=data, headers=JSON) as response:
            assert response.status == 200, await response.text()
            stream = Stream(response)
            await stream.first()
            yield stream

    def overlap_blocks(self, rank: WorkerRank, prompt: list[int]) -> int:
        """Return how many blocks of the prompt the rank's device holds, by its events."""
        return self.ground.index.overlap(sequence_hashes(prompt, self.block_size), [rank])[0].overlap_blocks[0]

    async def until_indexed(self, prompt: list[int]) -> None:
        """Return once the index knows that some rank holds the prompt's whole blocks."""
        await comes(
            lambda: max(self.overlap_blocks(rank, prompt) for rank in self.ranks) == PROMPT_BLOCKS,
            f"{self.worker_id}: the prompt's blocks in the index",
        )

    def is_proven(self, rank: WorkerRank) -> bool:
        """Whether the rank's newest heartbeat proves that index and mirror hold the same, and neither is stale."""
        beat, state = self.ground.heard.beats.get(rank), self.ground.index.state(rank)
        if beat is None or state is None or beat.stale or state.stale:
            return False
        held = {digest.tier: (digest.block_count, digest.digest) for digest in state.digests}
        said = {digest.tier: (digest.block_count, digest.digest) for digest in beat.tiers}
        same = all(held[tier] == said.get(tier, (0, 0)) for tier in TIERS)
        return same and (beat.epoch, beat.last_seq) == (state.epoch, state.seq)

    def loads(self) -> list[LoadReport]:
        """Return the newest report of each rank that had one."""
        return [report for rank in self.ranks for report in self.ground.heard.loads[rank][-1:]]

    def holds(self, blocks: int) -> bool:
        """Whether a rank's newest report has a request, and so many blocks that are held for it."""
        return any(each.running_requests and each.used_blocks >= blocks for each in self.loads())

    def is_free(self) -> bool:
        """Whether the newest reports say that nothing runs, waits or is held for requests."""
        busy = [each for each in self.loads() if each.running_requests or each.waiting_requests or each.used_blocks]
        return bool(self.loads()) and not busy

    async def figures(self) -> dict[str, float]:
        """Return what its `/metrics` says, by name and labels."""
        async with self.ground.session.get(f"{self.status_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


async def post(session: aiohttp.ClientSession, url: str, data: bytes, **headers: str) -> Answered:
    """Return the whole answer; `x_dp_rank` stands for the header `x-dp-rank`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with session.post(url, data=data, headers=JSON | named) as response:
        return Answered(response.status, dict(response.headers), await response.read())
