"""The engines that obey `worker_agent.port.types`, small and equal in size, and words for what is asked of them.

    simulated   stepped by the machine's clock, twenty times as fast; KV is carried over HTTP on loopback
    trtllm      `TensorRTLLMEngine` over the fake package; it computes as fast as it can

The second computes nothing more once it is frozen; neither computes between two turns of the event loop: a test that
asks what comes first does not depend on their speed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from kv_protocol.fleet import Role
from kv_runtime.clock import Clock
from tests.support.engine_description import described
from tests.support.trtllm import Fake
from worker_agent.api.encode_endpoint import ImageEncoder
from worker_agent.engine_args.arguments import EngineArgs, EngineOptions, effective_args
from worker_agent.engine_args.layers import layer
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.handovers import TransferRules
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.port.types import Engine, EngineError, EngineOutput, EngineRequest

BLOCK_SIZE = 4
BLOCKS = 64
LONGEST = 200
PROMPT = tuple(range(10, 20))
SPEED = 20.0
ROW_WAIT_S = 5.0


class Worker(Engine, ImageEncoder, Protocol):
    """An engine of any role."""


@dataclass(frozen=True)
class Running:
    """A driven engine: `driving` is the task of its `run`; `freeze` lets no further iteration begin."""

    engine: Worker
    driving: "asyncio.Task[None]"
    freeze: Callable[[], None]


class RunEngine(Protocol):
    """Starts an engine of a role, and drives it."""

    def __call__(self, role: Role = "aggregated") -> AbstractAsyncContextManager[Running]: ...


DESCRIPTION = described(block_size=BLOCK_SIZE, total_kv_blocks=BLOCKS, max_seq_len=LONGEST)
TRANSFERS = TransferRules(timeout_s=20.0)
"""One second of a test at `SPEED`: a prefill engine's stop waits so long for contexts that no decode engine fetches."""


def simulator(role: Role) -> Simulator:
    return Simulator(DESCRIPTION, role=role, transfers=TRANSFERS)


def simulated(_: Fake, make: Callable[[Role], Simulator] = simulator) -> RunEngine:
    return lambda role="aggregated": simulated_engine(make(role))


def simulated_engine(made: Simulator) -> AbstractAsyncContextManager[Running]:
    """Return what is to be entered for an engine whose contexts others can fetch."""
    engine = SimulatedEngine(made, Clock(), speed=SPEED)
    return driven(engine, lambda: None)


def trtllm(fake: Fake) -> RunEngine:
    fake.control.model = type(fake.control.model)(gpu_blocks=BLOCKS)
    return lambda role="aggregated": driven(trtllm_worker(role), fake.control.hold)


def trtllm_worker(role: Role) -> TensorRTLLMEngine:
    transceiver = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 8192}}
    if role == "encode":
        return trtllm_engine({"max_seq_len": None}, role=role)
    if role == "aggregated":
        return trtllm_engine()
    return trtllm_engine(transceiver, TrtllmSettings(transfer_s=0.1), role=role)


IMPLEMENTATIONS: dict[str, Callable[[Fake], RunEngine]] = {"simulated": simulated, "trtllm": trtllm}


@pytest.fixture(params=list(IMPLEMENTATIONS.values()), ids=list(IMPLEMENTATIONS))
def run_engine(request: pytest.FixtureRequest, trtllm: Fake) -> RunEngine:
    """Give a test each engine; it imports the fake's fixture, too."""
    made: RunEngine = request.param(trtllm)
    return made


def trtllm_engine(
    arguments: dict[str, Any] | None = None, settings: TrtllmSettings | None = None, **circumstances: Any
) -> TensorRTLLMEngine:
    """Return an engine with 4-token blocks, events and statistics, not started yet."""
    return TensorRTLLMEngine(trtllm_args(arguments, **circumstances), Clock(), model="m", settings=settings)


def trtllm_args(arguments: dict[str, Any] | None = None, **circumstances: Any) -> EngineArgs:
    """Return the arguments of such an engine."""
    values = {
        "model": "none",
        "max_seq_len": LONGEST,
        "max_num_tokens": 256,
        "max_batch_size": 8,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"tokens_per_block": BLOCK_SIZE},
        **(arguments or {}),
    }
    around = EngineOptions(publishes_kv_events=True, **circumstances)
    return effective_args([layer("file", [((), values, "engine.yaml")])], around)


@asynccontextmanager
async def driven(engine: Worker, freeze: Callable[[], None]) -> AsyncIterator[Running]:
    """Be where the engine is started and run; stop it without grace."""
    await engine.start()
    async with asyncio.TaskGroup() as group:
        driving = group.create_task(engine.run())
        try:
            yield Running(engine, driving, freeze)
        finally:
            await engine.stop(0.0)


def request(name: str = "a", max_tokens: int = 4, **fields: Any) -> EngineRequest:
    told: dict[str, Any] = {"request_id": name, "prompt": PROMPT, "max_tokens": max_tokens, **fields}
    return EngineRequest(**told)


async def outputs(engine: Engine, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(asked)]


async def failure(work: Awaitable[object]) -> EngineError | None:
    """Return the engine's error that ends the work, None if it ends well."""
    try:
        await work
    except EngineError as error:
        return error
    return None


def tokens_of(told: list[EngineOutput]) -> list[int]:
    return [token for output in told for token in output.token_ids]


async def rows_until(engine: Engine, is_over: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first row of statistics of which `is_over` holds; fail where the engine tells no more."""
    while rows := await asyncio.to_thread(engine.iteration_stats, ROW_WAIT_S):
        for row in rows:
            if is_over(row):
                return row
    raise AssertionError("the engine has come to rest, and told of no such iteration")
