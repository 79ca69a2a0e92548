"""Workers whose engines are real ones, where there are some: variables of the environment say where.

    kind                 runs where there is                               is
    ------------------   -----------------------------------------------   --------------------------------------------
    real-trtllm          KV_CONTRACT_TRTLLM=MODEL                          `worker-agent serve` as a process, with the
                         KV_CONTRACT_DEVICES=0,1,2: a GPU for each         installed package; on one GPU they share it
                         worker, in turn
    real-trtllm-serve    KV_CONTRACT_TRTLLM_SERVE_URL, and for the other   attached to servers that run already
                         roles .._PREFILL_URL, .._DECODE_URL
    real-vllm            KV_CONTRACT_VLLM_URL, KV_CONTRACT_VLLM_KV_EVENTS  likewise
                         and KV_CONTRACT_VLLM_REPLAY: tcp://host:port

    KV_CONTRACT_TEXT     the model's directory, where that is not KV_CONTRACT_TRTLLM
    KV_CONTRACT_SET      settings of all these workers: section.key=value, with blanks between
    KV_CONTRACT_WAIT_S   how long what must come is waited for, loading a model included

How they are started, and what is doubtful of it: `docs/TENSORRT_LLM.md`. Encode workers are not among them: they need
a model that takes images.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import psutil
import pytest

from bench.processes import ChildProcess
from kv_protocol.fleet import Role
from kv_runtime.config.loading import load_settings
from tests.contract.worker_kinds_attached import attached
from tests.contract.workers import Ground, Worker, comes
from tests.support.processes import agent_process
from worker_agent.attached.config import AttachSettings

_SERVE = "KV_CONTRACT_TRTLLM"
_TRTLLM_SERVE: dict[Role, str] = {
    "aggregated": "KV_CONTRACT_TRTLLM_SERVE_URL",
    "prefill": "KV_CONTRACT_TRTLLM_SERVE_PREFILL_URL",
    "decode": "KV_CONTRACT_TRTLLM_SERVE_DECODE_URL",
}
_VLLM: dict[Role, str] = {"aggregated": "KV_CONTRACT_VLLM_URL"}
REAL: dict[str, dict[Role, str]] = {
    "real-trtllm": dict.fromkeys(("aggregated", "prefill", "decode"), _SERVE),
    "real-trtllm-serve": _TRTLLM_SERVE,
    "real-vllm": _VLLM,
}
"""Of each kind, the variable that says whether there is one of a role."""
TEXT = os.environ.get("KV_CONTRACT_TEXT") or os.environ.get(_SERVE) or "byte"
_SET = os.environ.get("KV_CONTRACT_SET", "").split()
_DEVICES = os.environ.get("KV_CONTRACT_DEVICES", "").split(",")
_turns = count()


def roles_there(kind: str) -> tuple[Role, ...]:
    """Return the roles in which there are real engines of the kind."""
    return tuple(role for role, variable in REAL[kind].items() if os.environ.get(variable))


# ---------------------------------------------------------------------------------------------------------- trtllm
@asynccontextmanager
async def real_trtllm(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    path, worker_id = os.environ[_SERVE], ground.name("real-trtllm")
    process = agent_process(worker_id, ground.nats_url, *_trtllm_arguments(path, role, model))
    async with asyncio.TaskGroup() as group:
        with pytest.MonkeyPatch.context() as patch:
            if _DEVICES[0]:
                patch.setenv("CUDA_VISIBLE_DEVICES", _DEVICES[next(_turns) % len(_DEVICES)])
            await process.start(group)
        ending = group.create_task(_until_end(process))

        def stop() -> None:
            os.kill(process.pid, signal.SIGTERM)

        async def kill() -> None:
            children = psutil.Process(process.pid).children(recursive=True)
            assert children, "an engine computes in processes of its own"
            for child in children:
                child.kill()

        worker = Worker(ground, worker_id, model, "", stop, kill, ending)
        try:
            await comes(lambda: ending.done() or worker.told, f"{worker_id} in the fleet")
            assert worker.told, process.output
            worker.status_url = worker.registration.base_url
            yield worker
        finally:
            await process.end()


def _trtllm_arguments(path: str, role: Role, model: str) -> list[str]:
    transceiver = ["--trtllm.cache_transceiver_config.backend", "DEFAULT"] if role != "aggregated" else []
    return [
        *("--engine", "trtllm", "--model", path, "--served-name", model, "--role", role, "--max-seq-len", "4096"),
        *("--publish-kv-events", "--publish-metrics", "--free-gpu-memory-fraction", "0.2", *transceiver),
        *(part for each in (f"engine.text={TEXT}", *_SET) for part in ("--set", each)),
    ]


async def _until_end(process: ChildProcess) -> str:
    return process.output if await process.until_ended() else ""


# -------------------------------------------------------------------------------------------------------- attached
@asynccontextmanager
async def real_trtllm_serve(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    del model  # its server has a name for it
    at = ["engine.kind=trtllm-serve", f"engine.base_url={os.environ[_TRTLLM_SERVE[role]]}"]
    async with _attached(ground, role, at) as worker:
        yield worker


@asynccontextmanager
async def real_vllm(ground: Ground, role: Role, model: str) -> AsyncIterator[Worker]:
    del model
    at = [
        f"engine.base_url={os.environ[_VLLM[role]]}",
        f"engine.publish_endpoint={os.environ['KV_CONTRACT_VLLM_KV_EVENTS']}",
        f"engine.replay_endpoint={os.environ.get('KV_CONTRACT_VLLM_REPLAY', '')}",
    ]
    async with _attached(ground, role, at) as worker:
        yield worker


@asynccontextmanager
async def _attached(ground: Ground, role: Role, assignments: list[str]) -> AsyncIterator[Worker]:
    own = [f"worker.id={ground.name('real')}", f"worker.role={role}", f"nats.url={ground.nats_url}"]
    settings = load_settings(AttachSettings, assignments=[*own, f"engine.text={TEXT}", *assignments, *_SET])

    async def kill() -> None:
        raise AssertionError("the test did not start the engine, and may not end it")

    async with attached(ground, settings, kill) as worker:
        worker.model = worker.registration.model
        yield worker
