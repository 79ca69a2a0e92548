"""A chat with images, seen by a router and by the worker behind it: what one looks for, the other's engine holds."""

import asyncio
from typing import Any

import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.hashing import Hashing
from router.prompt import ModelPrompts as RoutersPrompts
from tests.contract.engines import BLOCK_SIZE, outputs
from tests.support.trtllm import trtllm
from tests.system.integration.test_media_engine import (
    TOKENS_PER_IMAGE,
    Model,
    asked,
    chat,
    held_by,
    model,
    picture,
    words,
    worker,
)
from tests.system.integration.test_served_media import served
from tests.system.integration.test_trtllm_engine import running
from tests.unit.router.test_image_prompts import worked
from tests.unit.worker_agent.media_samples import GIF
from worker_agent.media.config import ImageModelSection

__all__ = ["model", "trtllm"]

CHATS = [
    (picture(),),
    (words("look:"), picture(), words("and"), picture(GIF), words("which of them?")),
    (picture(GIF), picture(GIF), words("the same, twice")),
    (words("no picture at all, but quite some text"),),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("parts", CHATS)
async def test_a_router_looks_for_what_the_worker_s_engine_holds(model: Model, parts: tuple[Any, ...]) -> None:
    media = served(model, "aggregated", images=ImageModelSection(tokens_per_image=TOKENS_PER_IMAGE))
    request = chat(*parts)
    seen = await asyncio.to_thread(
        worked, RoutersPrompts(model.text), {"messages": request.messages}, Hashing(BLOCK_SIZE), media.rule
    )
    async with running(worker(model)) as engine:
        told = await outputs(engine, asked((await media.prompts.prompts(request))[0], max_tokens=1))
        held = held_by(engine)
    full = seen.token_count // BLOCK_SIZE
    assert seen.token_count == len(told[0].prompt or ((await media.prompts.prompts(request))[0]).tokens)
    assert seen.sequence_hashes == pack_u64(held[:full])
