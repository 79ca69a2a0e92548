"""Whole workers of every kind behind a real router in mode kv, which knows of them what the log says."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.worker_kinds import KINDS, kinds_with
from tests.contract.worker_kinds_real import TEXT
from tests.contract.worker_router import Router, routing
from tests.contract.workers import PROMPT_BLOCKS, Ground, Worker, comes, ground
from tests.system.integration.agent_http import CHAT, COMPLETIONS

__all__ = ["ground"]

TOKENS = 12
PAIRED = kinds_with("aggregated", "prefill", "decode")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def router(ground: Ground) -> AsyncIterator[Router]:
    async with routing(ground, TEXT) as running:
        yield running


@asynccontextmanager
async def several(ground: Ground, kind: str) -> AsyncIterator[list[Worker]]:
    """Be where as many aggregated workers of one model run as there can be."""
    async with AsyncExitStack() as stack:
        model = ground.name(f"routed-{kind}")
        starts = [KINDS[kind].start(ground, "aggregated", model) for _ in range(KINDS[kind].engines)]
        yield [await stack.enter_async_context(start) for start in starts]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", kinds_with("aggregated"))
async def test_the_holder_of_a_prompt_is_found_and_reuses_what_was_promised(router: Router, kind: str) -> None:
    async with several(router.ground, kind) as workers:
        await router.until_fit(*workers)
        one = workers[0]
        prompt = one.fresh_prompt()
        asked = {"prompt": prompt, "max_tokens": TOKENS}
        first = await router.ask(one, COMPLETIONS, asked)
        assert (first.status, first.headers["x-overlap-blocks"]) == (200, "0"), first.data
        holder = next(each for each in workers if each.worker_id == first.headers["x-worker-instance-id"])
        await router.until_overlap(holder, prompt)
        second = await router.ask(one, COMPLETIONS, asked)
        assert second.headers["x-worker-instance-id"] == holder.worker_id
        assert second.headers["x-overlap-blocks"] == str(PROMPT_BLOCKS)
        assert second.usage["prompt_tokens_details"]["cached_tokens"] == PROMPT_BLOCKS * holder.block_size
        assert second.said()["text"] == first.said()["text"]


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
