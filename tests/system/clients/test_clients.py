"""Published clients, and what Codex sends, run through router and attached engine without one refusal."""

import asyncio
import gzip
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.paths import RECORDINGS, ROOT
from tests.system.clients.engine import ANSWERS, DOUBLES, AllEndpoints
from tests.system.e2e.test_attached_engines import MODEL, Cluster, attaching, running_cluster
from tests.system.integration.engine_doubles import Rank

PYTHON = ROOT / "build" / "clients" / "bin" / "python"
CODEX = RECORDINGS / "codex-0.171.0.jsonl.gz"


@asynccontextmanager
async def engines(kind: str, cluster: Cluster, *workers: str) -> AsyncIterator[list[AllEndpoints]]:
    """Engines of a kind, attached, once the router would choose among all of them."""
    async with AsyncExitStack() as cleanup:
        doubles = []
        for worker in workers:
            double = DOUBLES[kind](model=MODEL, ranks=[Rank()], served_paths=tuple(ANSWERS), max_model_len=1 << 17)
            doubles.append(await cleanup.enter_async_context(double.serving()))
            await cleanup.enter_async_context(attaching(cluster, worker, double.url, kind=kind))
        await cluster.until_choosing_among(*workers)
        yield doubles


@pytest.mark.parametrize("kind", DOUBLES)
async def test_what_codex_sends_reaches_one_engine_as_it_was_sent(kind: str) -> None:
    """Recorded of `codex exec` in four conversations: its tools, patches, code, and a summary of what was said.

    Texts are cut after 500 characters. The turn that summarises a conversation has no tools: another prompt.
    """
    turns = [json.loads(line) for line in gzip.decompress(CODEX.read_bytes()).splitlines()]
    workers = defaultdict[tuple[str, bool], set[str]](set)
    async with running_cluster() as cluster, engines(kind, cluster, "a", "b") as doubles:
        for turn in turns:
            sent = json.dumps(turn["body"], ensure_ascii=False, separators=(",", ":")).encode()
            url = f"{cluster.client.data_url}{turn['path']}"
            async with cluster.client.session.post(url, headers=turn["headers"], data=sent) as response:
                answer = await response.read()
            assert (response.status, b"response.completed" in answer) == (200, True), answer
            worker = response.headers["x-worker-instance-id"]
            assert doubles["ab".index(worker)].requests[-1] == (turn["path"], {}, sent)
            workers[turn["conversation"], turn["body"].get("tools") == []].add(worker)
    assert sum(len(double.requests) for double in doubles) == len(turns) > 12
    assert {conversation: len(at) for conversation, at in workers.items()} == dict.fromkeys(workers, 1)


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
