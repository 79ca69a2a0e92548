"""An engine that publishes its KV events itself, as vLLM 0.24 does, and the flags of the process that attaches it.

Its cache is chains of blocks; `step` stores a chain and, when there are too many, removes the oldest. Source of the
wire: `docs/SOURCES.md` E3.1, E3.4, E3.6, E3.7.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import cache

import msgspec
import zmq
import zmq.asyncio

from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from tests.contract.engine_servers import vllm_event
from tests.system.faults.traffic import MODEL
from tests.system.integration.event_path import PlayedSource, zmq_context
from worker_agent.events.engine_events import EngineEvent, EngineRemoved, EngineStored

FOREIGN = WorkerRank("vllm-0", 0)
BLOCK_TOKENS = 16
_CHAIN_BLOCKS = 20
_CHAINS_MAX = 40
_SEND_BYTES = 1 << 14
_STEP_S = 0.05


class ForeignEngine(PlayedSource):
    """One engine with one publisher. `hwm` messages wait for a reader that is slow; the others are dropped.

    The newest `ring_max` batches can be had again.
    """

    def __init__(self, context: zmq.asyncio.Context, *, ring_max: int, hwm: int) -> None:
        live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        super().__init__(live, replay, topic=())
        live.set(zmq.SNDHWM, hwm)
        live.set(zmq.SNDBUF, _SEND_BYTES)
        replay.set(zmq.SNDHWM, 0)
        for socket in (live, replay):
            socket.bind("tcp://127.0.0.1:*")
        self._ring_max = ring_max

    def attached(self) -> tuple[str, ...]:
        """Return the flags of `worker-agent attach` that publish its streams."""
        worker = ("--worker-id", FOREIGN.worker_id, "--model", MODEL, "--block-size", str(BLOCK_TOKENS))
        return (*worker, *self.flags)

    def held(self, steps: int | None = None) -> set[int]:
        """Return the sequence hashes of what the cache had after so many steps; by default after all."""
        newest = self.sequence if steps is None else steps
        return set[int]().union(*map(_sequence_hashes, range(max(1, newest - _CHAINS_MAX + 1), newest + 1)))

    async def step(self) -> None:
        """One more chain is stored, the oldest is removed where there are too many; one batch tells of both."""
        chain = self.sequence + 1
        events: list[EngineEvent] = [_stored(chain)]
        if chain > _CHAINS_MAX:
            events.append(EngineRemoved(block_hashes=_hashes(chain - _CHAINS_MAX)))
        payload = msgspec.msgpack.encode([float(chain), [*map(vllm_event, events)], FOREIGN.dp_rank])
        await self.add(payload)
        self.ring.pop(self.sequence - 1 - self._ring_max, None)

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await self.step()
            await asyncio.sleep(_STEP_S)


def _tokens(chain: int) -> list[int]:
    return [chain * _CHAIN_BLOCKS + at // BLOCK_TOKENS for at in range(_CHAIN_BLOCKS * BLOCK_TOKENS)]


@cache
def _sequence_hashes(chain: int) -> tuple[int, ...]:
    return tuple(sequence_hashes(_tokens(chain), BLOCK_TOKENS))


def _hashes(chain: int) -> tuple[int, ...]:
    return tuple(chain * _CHAIN_BLOCKS + at for at in range(_CHAIN_BLOCKS))


def _stored(chain: int) -> EngineStored:
    return EngineStored(
        block_hashes=_hashes(chain),
        parent_block_hash=None,
        token_ids=tuple(_tokens(chain)),
        block_size=BLOCK_TOKENS,
    )


@asynccontextmanager
async def foreign_engine(*, ring_max: int = 100_000, hwm: int = 100_000) -> AsyncIterator[ForeignEngine]:
    """The engine answers replays while the block runs."""
    async with zmq_context() as context:
        engine = ForeignEngine(context, ring_max=ring_max, hwm=hwm)
        async with _at_work(engine.serve()):
            yield engine


@asynccontextmanager
async def stepping(engine: ForeignEngine) -> AsyncIterator[None]:
    """The engine's cache changes while the block runs."""
    async with _at_work(engine.run()):
        yield


@asynccontextmanager
async def _at_work(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    running = asyncio.ensure_future(work)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
