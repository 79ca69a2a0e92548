"""The doubles of engines elsewhere, as prefill and decode servers: they say what ours says, and are as strict."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.system.integration.double_contexts import CHAT, DISAGGREGATED_KEYS, Contexts, prompt_of
from tests.system.integration.engine_doubles import CHUNKS, EngineDouble, TrtllmServeDouble, VllmDouble
from worker_agent.api.disaggregated import Handoff, handoff_json, handoff_of_json

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


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_a_context_server_s_words_are_a_handoff_and_a_handoff_is_a_generation_server_s(path: str) -> None:
    async with pair(TrtllmServeDouble) as (prefill, decode):
        asked = PROMPTS[path] | {"disaggregated_params": {"request_type": "context_only", "disagg_request_id": 77}}
        status, data = await post(prefill, path, asked)
        answer = msgspec.json.decode(data)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, "length")
        assert answer["prompt_token_ids"] == prompt_of(PROMPTS[path]) == list(b"hello")
        handoff = handoff_of_json(msgspec.json.encode(choice["disaggregated_params"]))
        assert (handoff.first_gen_tokens, handoff.ctx_request_id, handoff.disagg_request_id) == ((97,), 77, 77)
        assert list(prefill.contexts.held) == [77]
        said = msgspec.json.decode(handoff_json(handoff)) | {"request_type": "generation_only"}
        status, data = await post(decode, path, PROMPTS[path] | {"disaggregated_params": said, "stream": True})
        assert (status, data) == (200, b"".join(CHUNKS))
        assert prefill.contexts.held == {}


@pytest.mark.asyncio
async def test_a_first_token_that_is_the_end_leaves_nothing_to_fetch() -> None:
    async with pair(TrtllmServeDouble, ends_at_once=True) as (prefill, _):
        asked = PROMPTS[COMPLETION] | {"disaggregated_params": {"request_type": "context_only"}}
        (choice,) = msgspec.json.decode((await post(prefill, COMPLETION, asked))[1])["choices"]
        assert choice["finish_reason"] == "stop"
        assert handoff_of_json(msgspec.json.encode(choice["disaggregated_params"])).opaque_state is None
        assert prefill.contexts.held == {}


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_server_without_a_transceiver_serves_both_phases_alone() -> None:
    async with TrtllmServeDouble().serving() as engine:
        for kind in ("context_only", "generation_only"):
            asked = PROMPTS[COMPLETION] | {"disaggregated_params": {"request_type": kind}}
            assert (await post(engine, COMPLETION, asked))[0] == 400
        assert (await post(engine, COMPLETION, PROMPTS[COMPLETION]))[0] == 200


@pytest.mark.asyncio
async def test_a_streamed_context_surprises() -> None:
    async with pair(TrtllmServeDouble) as (prefill, _):
        params = {"request_type": "context_only"}
        await post(prefill, COMPLETION, PROMPTS[COMPLETION] | {"disaggregated_params": params, "stream": True})
        assert prefill.surprises == ["a context that is streamed"]
        prefill.surprises.clear()


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_vllm_s_decode_server_records_requested_blocks_that_are_not_held() -> None:
    said = {"do_remote_prefill": True, "remote_block_ids": [3], "remote_engine_id": "unknown"}
    async with pair(VllmDouble) as (_, decode):
        await post(decode, COMPLETION, PROMPTS[COMPLETION] | {"kv_transfer_params": said})
        assert decode.surprises == ["blocks 3 of unknown"]
        decode.surprises.clear()


def test_the_keys_are_those_that_a_handoff_without_media_has() -> None:
    ours = {field.encode_name for field in msgspec.structs.fields(Handoff)}
    media = {name for name in ours if name.startswith(("multimodal_", "mrope_"))}
    assert ours - media - {"others"} <= DISAGGREGATED_KEYS
