"""The kinds of workers, and how one is started, asked to stop, and deprived of its engine.

    kind                    process   engine                                roles        ranks
    ---------------------   -------   -----------------------------------   ----------   ---------------------------
    simulated               serve     simulated                             all          2
    trtllm                  serve     TensorRT-LLM's, by the fake package   all          2, attention DP
    attached-trtllm-serve   attach    likewise, behind the server's double  not encode   1: no header chooses one
    attached-vllm           attach    simulated, behind the server's        aggregated   2; requests are forwarded
                                      double

Ranks are those of aggregated workers, all others have one. Routers speak no handoffs of vLLM's: it has one role here.
`serve` and `attach` run whole, as they are composed, as tasks of this process; engines' servers beside them. That is
where the fake lets decode engines take what prefill engines hold; TensorRT-LLM's engines as processes of their own are
in `tests/system/e2e/test_serve_trtllm.py`. Real ones: `worker_kinds_real.py`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import pytest

from kv_protocol.fleet import Role
from kv_runtime.config.loading import load_settings
from tests.contract.worker_kinds_attached import attached_trtllm_serve, attached_vllm
from tests.contract.worker_kinds_real import TEXT, real_trtllm, real_trtllm_serve, real_vllm, roles_there
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
from worker_agent.commands import engine_choice
from worker_agent.commands.engine_choice import chosen_engine
from worker_agent.commands.serve import ServedWorker
from worker_agent.config import AgentSettings
from worker_agent.engine_args.arguments import EngineOptions

PLACEHOLDER, IMAGE_TOKEN = "<image>", ord("<")
"""What stands for an image in an encode worker's prompts, and the one of its tokens that is the image."""
EVERY: tuple[Role, ...] = ("aggregated", "prefill", "decode", "encode")

Start = Callable[[Ground, Role, str], AbstractAsyncContextManager[Worker]]
"""Starts a worker of a role, for a model of this name; it has joined the fleet."""


class Kind(NamedTuple):
    """What can be stated of a kind beforehand; nothing else may differ.

    `ranks` are an aggregated worker's; `sizes`: blocks, longest, sequences, tokens of a batch; None: the engine's own.
    `tells_batch`: its engine tells how many sequences it decodes together; vLLM's server does not (0.24.0: /metrics has
    `cache_config_info` alone, of `vllm/config/cache.py`, and /v1/models `max_model_len`).
    `takes_prompt_ids`: its router sends it the prompt's ids beside the text. `requires_handoff`: a decode worker
    refuses requests without; trtllm-serve's computes the prompt itself. `engines`: how many of a role there can be.
    """

    start: Start
    roles: tuple[Role, ...]
    ranks: int = 1
    sizes: tuple[int, ...] | None = (BLOCKS, LONGEST, SEQUENCES, BATCHED)
    tells_batch: bool = True
    text: str = "byte"
    takes_prompt_ids: bool = True
    requires_handoff: bool = True
    engines: int = 2
    can_be_killed: bool = True


@contextmanager
def mortal() -> Iterator[list[MortalEngine]]:
    """Be where simulated engines of served workers can be told to die; the list has them."""
    made: list[MortalEngine] = []

    def make(*arguments: Any, **named: Any) -> MortalEngine:
        made.append(MortalEngine(*arguments, **named))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_choice, "SimulatedEngine", make)
        yield made


@asynccontextmanager
async def simulated(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    worker_id, ranks = ground.name("simulated"), RANKS if role == "aggregated" else 1
    assignments = [
        *(f"engine.model={model}", f"engine.block_size={BLOCK_SIZE}", f"engine.total_kv_blocks={BLOCKS}"),
        *(f"engine.max_seq_len={LONGEST}", f"engine.max_num_seqs={SEQUENCES}", f"engine.speed={SPEED}"),
        *(f"engine.max_num_batched_tokens={BATCHED}", f"engine.dp_ranks={ranks}"),
        *image_settings(role),
    ]
    settings = served_settings(ground, worker_id, role, assignments)
    with mortal() as made:

        async def kill() -> None:
            made[0].death.set()

        async with served(ground, settings, EngineOptions(), model, kill) as worker:
            yield worker


def image_settings(role: Role) -> list[str]:
    """Return what an encode worker is told of a model that takes images, which it needs."""
    return [f"images.placeholder={PLACEHOLDER}", f"images.token_id={IMAGE_TOKEN}"] if role == "encode" else []


def served_settings(ground: Ground, worker_id: str, role: Role, assignments: list[str]) -> AgentSettings:
    """Return the settings of a worker that is served quickly."""
    own = [f"worker.id={worker_id}", f"worker.role={role}", f"nats.url={ground.nats_url}", "engine.text=byte"]
    return load_settings(AgentSettings, assignments=[*own, *assignments])


@asynccontextmanager
async def served(
    ground: Ground,
    settings: AgentSettings,
    options: EngineOptions,
    model: str,
    kill: Callable[[], Awaitable[None]],
) -> AsyncIterator[Worker]:
    chosen = chosen_engine(settings, options)
    worker_id = settings.worker.id

    async def run(stop: asyncio.Event, say: Callable[[str], None]) -> None:
        await ServedWorker(settings, chosen).run(stop, say)

    async with ran(ground, worker_id, model, run, kill, f"worker {worker_id} on ") as worker:
        yield worker


@asynccontextmanager
async def trtllm(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    settings = served_settings(
        ground,
        ground.name("trtllm"),
        role,
        [
            *("engine.kind=trtllm", f"engine.served_names=[{model}]", "trtllm.transfer_s=0.2"),
            *image_settings(role),
        ],
    )
    override, executors = json.dumps({"model": "none", **trtllm_arguments(role)}), Executors(ground)
    options = EngineOptions(override=override, publishes_kv_events=role != "encode")
    with small_model(ground):
        async with served(ground, settings, options, model, executors.kill) as worker:
            executors.begun()
            yield worker


KINDS: dict[str, Kind] = {
    "simulated": Kind(simulated, EVERY, ranks=RANKS),
    "trtllm": Kind(trtllm, EVERY, ranks=RANKS),
    "attached-trtllm-serve": Kind(attached_trtllm_serve, EVERY[:3], takes_prompt_ids=False, requires_handoff=False),
    "attached-vllm": Kind(attached_vllm, EVERY[:1], ranks=RANKS, sizes=(BLOCKS, LONGEST, 0, 0), tells_batch=False),
}
_REAL = {
    "real-trtllm": Kind(real_trtllm, sizes=None, text=TEXT, roles=roles_there("real-trtllm")),
    "real-trtllm-serve": Kind(
        real_trtllm_serve,
        sizes=None,
        text=TEXT,
        roles=roles_there("real-trtllm-serve"),
        takes_prompt_ids=False,
        requires_handoff=False,
        engines=1,
        can_be_killed=False,
    ),
    "real-vllm": Kind(
        real_vllm,
        sizes=None,
        text=TEXT,
        roles=roles_there("real-vllm"),
        tells_batch=False,
        takes_prompt_ids=False,
        engines=1,
        can_be_killed=False,
    ),
}
KINDS |= {name: kind for name, kind in _REAL.items() if kind.roles}


def kinds_with(*roles: Role) -> list[str]:
    """Return the kinds that have workers of all these roles."""
    return sorted(name for name, kind in KINDS.items() if {*roles} <= {*kind.roles})
