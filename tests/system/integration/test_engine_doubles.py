"""The doubles of engines elsewhere, as prefill and decode servers: they say what ours says, and are as strict."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.system.integration.double_contexts import CHAT, Contexts
from tests.system.integration.engine_doubles import CHUNKS, EngineDouble, TrtllmServeDouble, VllmDouble

COMPLETION = "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": "m", "prompt": "hello"},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
}


@asynccontextmanager
async def pair(kind: type[EngineDouble], **contexts: Any) -> AsyncIterator[tuple[EngineDouble, EngineDouble]]:
    """Be where a prefill and a decode server hand over."""
    shared = Contexts(**contexts)
    async with kind(contexts=shared).serving() as prefill, kind(contexts=shared).serving() as decode:
        yield prefill, decode


async def post(engine: EngineDouble, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize(
    ("params", "status", "why"),
    [
        ({"request_type": "generation_only"}, 400, b"first_gen_tokens"),
        ({"request_type": "generation_only", "first_gen_tokens": [97], "ctx_request_id": 1}, 500, b"not held"),
        ({"request_type": "else"}, 400, b"request_type"),
        ({"request_type": "context_only", "multimodal_hashes": []}, 400, b"Extra inputs"),
        ({"request_type": "context_and_generation"}, 200, b"ab"),
    ],
)
async def test_a_generation_server_takes_what_a_context_server_said(params: Any, status: int, why: bytes) -> None:
    async with pair(TrtllmServeDouble) as (_, decode):
        told, data = await post(decode, COMPLETION, PROMPTS[COMPLETION] | {"disaggregated_params": params})
        assert (told, why in data) == (status, True)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_vllm_s_two_servers_hand_over_by_kv_transfer_params(path: str) -> None:
    async with pair(VllmDouble) as (prefill, decode):
        asked = PROMPTS[path] | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        status, data = await post(prefill, path, asked | {"max_tokens": 1})
        said = msgspec.json.decode(data)["kv_transfer_params"]
        assert (status, said["do_remote_prefill"], said["remote_engine_id"]) == (200, True, prefill.url)
        assert len(prefill.contexts.held) == 1
        status, data = await post(decode, path, PROMPTS[path] | {"kv_transfer_params": said, "stream": True})
        assert (status, data) == (200, b"".join(CHUNKS))
        assert prefill.contexts.held == {}
