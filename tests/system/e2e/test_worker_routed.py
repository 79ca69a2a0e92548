"""Whole workers of every kind behind a real router in mode kv, which knows of them what the log says."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.worker_kinds import KINDS, kinds_with
from tests.contract.worker_kinds_real import TEXT
from tests.contract.worker_router import Router, routing
from tests.contract.workers import PROMPT_BLOCKS, Ground, comes, ground
from tests.system.integration.agent_http import CHAT, COMPLETIONS

__all__ = ["ground"]

TOKENS = 12
PAIRED = kinds_with("aggregated", "prefill", "decode")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def router(ground: Ground) -> AsyncIterator[Router]:
    async with routing(ground, TEXT) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", PAIRED)
async def test_a_prompt_is_computed_by_one_worker_and_decoded_by_another(router: Router, kind: str) -> None:
    model, start, ground = f"paired-{kind}", KINDS[kind].start, router.ground
    async with start(ground, "prefill", model) as prefill, start(ground, "decode", model) as decode:
        await router.until_fit(prefill, decode)
        async with start(ground, "aggregated", f"one-{kind}") as one:
            for path in (CHAT, COMPLETIONS):
                prompt = one.fresh_prompt()
                asked: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS}
                if path == CHAT:
                    asked = {"messages": [{"role": "user", "content": bytes(prompt).decode()}], "max_tokens": TOKENS}
                expected = (await one.ask(path, asked)).said()
                for streamed in (False, True):
                    answered = await router.ask(decode, path, asked | {"stream": streamed})
                    assert (answered.status, answered.said()["text"]) == (200, expected["text"]), answered.data
                    assert answered.headers["x-worker-instance-id"] == decode.worker_id
        await prefill.until_indexed(prompt)
        asked = {"prompt": decode.fresh_prompt(), "max_tokens": TOKENS}
        await decode.ask(COMPLETIONS, asked | {"disaggregated_params": {"request_type": "context_and_generation"}})
        for cached in (0, PROMPT_BLOCKS * prefill.block_size):  # at the prefill worker, which computes the prompt
            answered = await router.ask(decode, COMPLETIONS, asked)
            assert answered.usage["prompt_tokens_details"]["cached_tokens"] == cached
        await comes(lambda: prefill.is_free() and decode.is_free(), "nothing held")
