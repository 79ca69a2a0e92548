"""Published clients, and what Codex sends, run through router and attached engine without one refusal."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kv_runtime.clock import SystemClock
from tests.support.paths import ROOT
from tests.system.clients.engine import ANSWERS, DOUBLES, AllEndpoints
from tests.system.e2e.test_attached_engines import MODEL, Cluster, published, running_cluster, speaking_for
from tests.system.integration.engine_doubles import Rank
from tests.system.integration.event_path import zmq_context

PYTHON = ROOT / "build" / "clients" / "bin" / "python"
WAIT_S = 60.0
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]}
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You edit files.",
    "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be safe"}]}, USER],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search"},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "1"},
}
ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
    {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "c1"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    {"type": "local_shell_call", "call_id": "c2", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "function_call", "name": "shell", "arguments": '{"cmd": ', "call_id": "c3"},
    {"type": "function_call_output", "call_id": "c3", "output": "not run"},
]


@asynccontextmanager
async def engines(kind: str, cluster: Cluster, *workers: str) -> AsyncIterator[list[AllEndpoints]]:
    """Engines of a kind, attached, once the router would choose among all of them."""
    async with AsyncExitStack() as cleanup:
        context = await cleanup.enter_async_context(zmq_context())
        published_by = [await published(context, 1) for _ in workers]
        doubles = []
        for worker, (_, (publish, replay)) in zip(workers, published_by, strict=True):
            double = DOUBLES[kind](model=MODEL, ranks=[Rank()], served_paths=tuple(ANSWERS), max_model_len=1 << 17)
            doubles.append(await cleanup.enter_async_context(double.serving()))
            sockets = ("--kv-events", publish, "--replay-endpoint", replay)
            arguments = ("--engine", kind, "--url", double.url, *sockets)
            await cleanup.enter_async_context(speaking_for(worker, cluster.nats_url, *arguments))
        async with asyncio.timeout(WAIT_S):
            while await cluster.candidates([1, 2, 3]) != set(workers):
                await SystemClock().sleep(0.05)
        yield doubles


@pytest.mark.asyncio
async def test_what_codex_sends_reaches_the_engine_as_it_was_sent() -> None:
    turns = [CODEX, *({**CODEX, "input": [*CODEX["input"], *ITEMS[:at]]} for at in range(1, len(ITEMS) + 1))]
    async with running_cluster() as cluster, engines("vllm", cluster, "a") as (double,):
        answered = [await cluster.client.post("/v1/responses", turn) for turn in turns]
    assert {each.status for each in answered} == {200}
    assert [json.loads(data) for path, _, data in double.requests if path == "/v1/responses"] == turns


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("kind", DOUBLES)
async def test_every_call_of_published_clients_is_answered(kind: str) -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is absent: `make clients` makes it")
    async with running_cluster() as cluster, engines(kind, cluster, "a") as (double,):
        script = str(ROOT / "tests" / "system" / "clients" / "calls.py")
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), script, cluster.client.data_url, MODEL),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # else litellm asks the network for prices
        )
        told, _ = await process.communicate()
    lines = told.decode().splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) > 20
    assert {path for path, _, _ in double.requests} >= set(ANSWERS) - {"/v1/rerank"}
