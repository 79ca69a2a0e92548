"""What every whole worker does in its role, whatever its kind: the same assertions for all.

Prompts are computed by one worker and decoded by another of the same kind, and of the other where both speak
TensorRT-LLM's handoffs: our agent's engine and `trtllm-serve`.
"""

import json
from typing import Any

import pytest

from kv_protocol.fleet import Role, WorkerDraining, WorkerLeft, WorkerRegistered
from tests.contract.worker_kinds import KINDS, PLACEHOLDER, kinds_with
from tests.contract.workers import PROMPT_BLOCKS, Ground, Worker, comes, ground, post
from tests.support.engine_description import handoff_of_json
from tests.system.integration.agent_http import CHAT, COMPLETIONS
from tests.unit.worker_agent.media_samples import GIF, PNG, data_url
from worker_agent.media.encode_client import PATH
from worker_agent.media.inputs import digest_words
from worker_agent.media.parts import content_digest

__all__ = ["ground"]

TOKENS = 12
PICTURES = [data_url(PNG), data_url(GIF, "image/gif")]
COMPONENTS: dict[Role, str] = {"aggregated": "backend", "prefill": "prefill", "decode": "backend", "encode": "encode"}
ALONE = {"disaggregated_params": {"request_type": "context_and_generation"}}
CONTEXT = {"disaggregated_params": {"request_type": "context_only"}, "max_tokens": 1, "stream": False}
SAME = [(kind, kind) for kind in kinds_with("aggregated", "prefill", "decode")]
ACROSS = [("trtllm", "attached-trtllm-serve"), ("attached-trtllm-serve", "trtllm")]


async def handed_over(prefill: Worker, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be added to the request, so that a decode worker goes on with it."""
    answered = await prefill.ask(path, asked | CONTEXT)
    assert answered.status == 200, answered.data
    params = answered.said()["disaggregated_params"]
    assert handoff_of_json(json.dumps(params).encode()).first_gen_tokens
    return {"disaggregated_params": params | {"request_type": "generation_only"}}


# ---------------------------------------------------------------------------------------------------------- places
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("kind", "role"), [(name, role) for name in sorted(KINDS) for role in KINDS[name].roles])
async def test_it_joins_by_its_role_and_takes_its_leave(ground: Ground, kind: str, role: Role) -> None:
    async with KINDS[kind].start(ground, role, f"role-{kind}") as worker:
        said = worker.registration
        assert (said.role, said.endpoint) == (role, f"dynamo.{COMPONENTS[role]}.generate")
        await comes(lambda: all(rank in ground.heard.beats for rank in worker.ranks), "a pulse of every rank")
        worker.stop()
        assert await worker.ending == ""
        await comes(lambda: isinstance(worker.told[-1], WorkerLeft), "that it left")
    assert [type(event) for event in worker.told] == [WorkerRegistered, WorkerDraining, WorkerLeft]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("kind", "role"),
    [(name, role) for name in sorted(KINDS) if KINDS[name].can_be_killed for role in KINDS[name].roles[1:]],
)
async def test_when_an_idle_engine_dies_the_fleet_hears_of_it(ground: Ground, kind: str, role: Role) -> None:
    async with KINDS[kind].start(ground, role, f"idle-{kind}") as worker:
        await worker.kill()
        await comes(lambda: isinstance(worker.told[-1], WorkerLeft), "that it is gone")
    assert [type(event) for event in worker.told] == [WorkerRegistered, WorkerLeft]


# ---------------------------------------------------------------------------------------------- prefill and decode
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("first", "second"), SAME + ACROSS)
async def test_two_workers_say_what_one_says(ground: Ground, first: str, second: str, path: str) -> None:
    async with (
        KINDS[first].start(ground, "prefill", f"two-{first}") as prefill,
        KINDS[second].start(ground, "decode", f"two-{first}") as decode,
        KINDS[second].start(ground, "aggregated", f"two-{first}") as one,
    ):
        prompt = prefill.fresh_prompt()
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS}
        if path == CHAT:
            asked = {"messages": [{"role": "user", "content": bytes(prompt).decode()}], "max_tokens": TOKENS}
        expected = await one.ask(path, asked)
        for streamed in (False, True):
            handoff = await handed_over(prefill, path, asked)
            answered = await decode.ask(path, asked | handoff | {"stream": streamed})
            assert answered.status == 200, answered.data
            assert answered.said()["text"] == expected.said()["text"] != ""
            assert answered.said()["finish_reason"] == expected.said()["finish_reason"]
        if path == COMPLETIONS:
            await prefill.until_indexed(prompt)
            await decode.until_indexed(prompt)
        await comes(prefill.is_free, "what was fetched is held no more")
        await comes(decode.is_free, "nothing runs")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("first", "second"), SAME)
async def test_a_client_that_goes_leaves_nothing_held_at_either(ground: Ground, first: str, second: str) -> None:
    async with (
        KINDS[first].start(ground, "prefill", f"gone-{first}") as prefill,
        KINDS[second].start(ground, "decode", f"gone-{first}") as decode,
    ):
        asked = {"prompt": prefill.fresh_prompt(), "max_tokens": prefill.long}
        handoff = await handed_over(prefill, COMPLETIONS, asked)
        await comes(
            lambda: any(each.used_blocks >= PROMPT_BLOCKS for each in prefill.loads()[-1:]),
            "that the prompt's KV is held",
        )
        async with decode.open(asked | handoff) as stream:
            await comes(lambda: decode.holds(PROMPT_BLOCKS), "that it runs")
            assert not stream.is_done
        await comes(lambda: prefill.is_free() and decode.is_free(), "nothing held")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", kinds_with("aggregated", "decode"))
async def test_a_decode_worker_serves_alone_where_it_is_told_to(ground: Ground, kind: str) -> None:
    async with (
        KINDS[kind].start(ground, "decode", f"alone-{kind}") as decode,
        KINDS[kind].start(ground, "aggregated", f"alone-{kind}") as one,
    ):
        prompt = decode.fresh_prompt()
        asked = {"prompt": prompt, "max_tokens": TOKENS}
        told, expected = await decode.ask(COMPLETIONS, asked | ALONE), await one.ask(COMPLETIONS, asked)
        assert (told.status, told.said()["text"]) == (200, expected.said()["text"]), told.data
        await decode.until_indexed(prompt)


# ---------------------------------------------------------------------------------------------------------- encode
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", kinds_with("encode"))
async def test_an_encode_worker_encodes_and_generates_nothing(ground: Ground, kind: str) -> None:
    media = [{"field": f"messages[0].content[{at}]", "url": url} for at, url in enumerate(PICTURES)]
    async with KINDS[kind].start(ground, "encode", f"encode-{kind}") as worker:
        asked = {"model": worker.model, "form": "handles", "prompt": PLACEHOLDER * 2, "media": media}
        encoded = await post(ground.session, worker.registration.base_url + PATH, json.dumps(asked).encode())
        refused = await worker.ask(COMPLETIONS, {"prompt": "hello", "max_tokens": 2})
    assert encoded.status == 200, encoded.data
    digests = [content_digest(data) for data in (PNG, GIF)]
    handoff = handoff_of_json(json.dumps(encoded.body["disaggregated_params"]).encode())
    assert encoded.body["digests"] == digests
    assert handoff.multimodal_hashes == tuple(map(tuple, map(digest_words, digests)))
    assert len(handoff.multimodal_embedding_handles or ()) == len(media)
    assert (refused.status, refused.body["error"]["param"]) == (400, "role")
