"""What the kinds of workers have in common: their size, and how one runs in this process, ends, or dies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from kv_protocol.fleet import Role
from kv_runtime.supervise import PartGaveUp, until
from tests.contract.workers import Ground, Worker, comes
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.port.types import EngineStopped

BLOCK_SIZE = 16
BLOCKS = 900
LONGEST = 8192
SEQUENCES = 8
BATCHED = LONGEST
RANKS = 2
SPEED = 10.0
TRANSCEIVER = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": LONGEST}}


class Lines(list[str]):
    """What a process says."""

    def word_after(self, words: str) -> str:
        """Return the word that follows `words`; empty where no line has them."""
        return next((line.split(words)[1].split()[0] for line in self if words in line), "")


async def until_end(running: Coroutine[Any, Any, None]) -> str:
    """Return why the worker ended by itself; empty where it was asked to."""
    try:
        await running
    except PartGaveUp as error:
        return str(error)
    return ""


@asynccontextmanager
async def ran(
    ground: Ground,
    worker_id: str,
    model: str,
    run: Callable[[asyncio.Event, Callable[[str], None]], Coroutine[Any, Any, None]],
    kill: Callable[[], Awaitable[None]],
    said: str,
) -> AsyncIterator[Worker]:
    """Be where the worker runs and is in the fleet; `said` stands before the address of its metrics."""
    stop, lines = asyncio.Event(), Lines()
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(until_end(run(stop, lines.append)))
        worker = Worker(ground, worker_id, model, "", stop.set, kill, ending)
        try:
            await comes(lambda: ending.done() or (worker.told and lines.word_after(said)), f"{worker_id} in the fleet")
            assert worker.told, f"{worker_id} ended before it was in the fleet: {ending.result()}"
            worker.status_url = lines.word_after(said)
            yield worker
        finally:
            stop.set()


class MortalEngine(SimulatedEngine):
    """A simulated engine that can be told to die, which it never does by itself."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.death = asyncio.Event()

    async def run(self) -> None:
        await until(self.death, super().run())
        if self.death.is_set():
            raise EngineStopped("the engine is dead: as was planned")


class Executors:
    """The fake's executors that one worker began."""

    def __init__(self, ground: Ground) -> None:
        self._control = ground.fake.control
        self._before = set(self._control.executors)
        self._own: set[Any] = set()

    def begun(self) -> None:
        """Those that were not there before are the worker's."""
        self._own = set(self._control.executors) - self._before

    async def kill(self) -> None:
        """They have had a fatal error."""
        self._control.kill(RuntimeError("CUDA error: as was planned"), among=self._own)


@contextmanager
def small_model(ground: Ground) -> Iterator[None]:
    """Be where engines of the fake have this size, and speak ASCII."""
    control, before = ground.fake.control, ground.fake.control.model
    control.model = replace(before, vocab_size=128, gpu_blocks=BLOCKS)
    try:
        yield
    finally:
        control.model = before


def trtllm_arguments(role: Role) -> dict[str, Any]:
    """Return the engine's arguments for a worker of this role."""
    if role == "encode":
        return {}
    sizes = {"dtype": "bfloat16", "max_seq_len": LONGEST, "max_batch_size": SEQUENCES, "max_num_tokens": BATCHED}
    measured = {"enable_iter_perf_stats": True, "return_perf_metrics": True}
    events = {**measured, "kv_cache_config": {"tokens_per_block": BLOCK_SIZE}}
    if role != "aggregated":
        return sizes | events | TRANSCEIVER
    return sizes | events | {"tensor_parallel_size": RANKS, "enable_attention_dp": True}
