"""Workers whose engines run elsewhere, behind servers of their own: `worker-agent attach`, and the server beside it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kv_protocol.fleet import Role
from kv_runtime.clock import Clock
from kv_runtime.config.loading import load_settings
from tests.contract.engine_servers import ComputingTrtllmServe, ComputingVllm, completions, engine_running, publishing
from tests.contract.engines import trtllm_engine
from tests.contract.worker_runs import (
    BATCHED,
    BLOCK_SIZE,
    BLOCKS,
    LONGEST,
    RANKS,
    SEQUENCES,
    SPEED,
    Executors,
    MortalEngine,
    ran,
    small_model,
    trtllm_arguments,
)
from tests.contract.workers import Ground, Worker
from tests.support.engine_description import described
from tests.system.integration.engine_doubles import Rank
from tests.system.integration.event_path import endpoint_of, playing, zmq_context
from worker_agent.attached.config import AttachSettings
from worker_agent.commands.processes import run_attached
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.trtllm.settings import TrtllmSettings


@asynccontextmanager
async def attached_trtllm_serve(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    arguments = trtllm_arguments(role) | {"tensor_parallel_size": 1, "enable_attention_dp": False}
    server, executors = ComputingTrtllmServe(model=model, block_size=BLOCK_SIZE), Executors(ground)
    with small_model(ground):
        server.engine = trtllm_engine(arguments, TrtllmSettings(watch_s=0.05, transfer_s=0.2), role=role)
        async with engine_running(server.engine), server.serving():
            executors.begun()
            server.answering = completions(server.engine, model, role)
            at = ["engine.kind=trtllm-serve", f"engine.base_url={server.url}"]
            at += [f"engine.max_num_seqs={SEQUENCES}", f"engine.max_num_batched_tokens={BATCHED}"]

            async def kill() -> None:
                await executors.kill()
                server.is_healthy = False

            async with attached(ground, attached_settings(ground, role, model, at), kill) as worker:
                yield worker


@asynccontextmanager
async def attached_vllm(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    assert role == "aggregated"
    server = ComputingVllm(model=model, ranks=[Rank()] * RANKS, total_blocks=BLOCKS, max_model_len=LONGEST)
    sizes = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": BATCHED, "max_seq_len": LONGEST}
    description = described(block_size=BLOCK_SIZE, total_kv_blocks=BLOCKS, dp_ranks=tuple(range(RANKS)), **sizes)
    server.engine = engine = MortalEngine(Simulator(description), Clock(), speed=SPEED)
    server.answering = completions(server.engine, model, role)

    async def kill() -> None:
        server.is_healthy = False
        engine.death.set()

    async with (
        engine_running(server.engine),
        server.serving(),
        zmq_context() as context,
        playing(context, RANKS, topic=()) as sources,
    ):
        publish, replay = endpoint_of(sources[0].publish), endpoint_of(sources[0].replay)
        at = [f"engine.publish_endpoint={publish}", f"engine.replay_endpoint={replay}", "engine.kind=vllm"]
        at += [f"engine.base_url={server.url}", f"engine.dp_ranks={RANKS}"]
        at += ["engine.stream_token_ids=false"]  # our agent's code answers for the engine, and knows no such wish
        settings = attached_settings(ground, role, model, at)
        async with publishing(server.engine, sources), attached(ground, settings, kill) as worker:
            yield worker


def attached_settings(ground: Ground, role: Role, model: str, assignments: list[str]) -> AttachSettings:
    """Return the settings of an attached engine whose cache and longest sequence are told."""
    return load_settings(
        AttachSettings,
        assignments=[
            *(f"worker.id={ground.name('attached')}", f"worker.role={role}", f"nats.url={ground.nats_url}"),
            *(f"engine.model={model}", f"engine.block_size={BLOCK_SIZE}", f"engine.total_kv_blocks={BLOCKS}"),
            *(f"engine.max_seq_len={LONGEST}", "engine.text=byte", "engine.kv_cache_dtype=bfloat16"),
            *assignments,
        ],
    )


@asynccontextmanager
async def attached(
    ground: Ground, settings: AttachSettings, kill: Callable[[], Awaitable[None]]
) -> AsyncIterator[Worker]:
    async def run(stop: asyncio.Event, say: Callable[[str], None]) -> None:
        await run_attached(settings, stop, say)

    worker_id, model = settings.worker.id, settings.engine.model
    async with ran(ground, worker_id, model, run, kill, "status on ") as worker:
        yield worker
