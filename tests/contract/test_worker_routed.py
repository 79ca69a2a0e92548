"""Whole workers of every kind behind a real router in mode kv, which knows of them what the log says."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from bench.processes import Process
from kv_runtime.clock import SystemClock
from tests.contract import workers
from tests.contract.worker_kinds import KINDS
from tests.contract.workers import PROMPT_BLOCKS, Ground, Worker, comes, ground, post
from tests.integration.agent_http import CHAT, COMPLETIONS, Answered

__all__ = ["ground"]

TOKENS = 12
PAIRED = sorted(name for name, kind in KINDS.items() if "decode" in kind.roles)


class Router(NamedTuple):
    """A router on the ground's log."""

    ground: Ground
    data_url: str
    control_url: str

    async def ask(self, worker: Worker, path: str, asked: dict[str, Any]) -> Answered:
        """Return what clients of the router get of the worker's model; who reads an event stream reads no comments."""
        answered = await post(self.ground.session, self.data_url + path, worker.greedy(asked))
        return replace(answered, data=re.sub(rb"(?m)^:.*\n", b"", answered.data))

    async def until_fit(self, *awaited: Worker) -> None:
        """Return once the router counts on these workers."""
        names = {worker.worker_id for worker in awaited}

        async def are_fit() -> bool:
            return names <= {name for name, unfit in (await self._known()).items() if not unfit}

        await until(are_fit, f"{names} fit")

    async def until_gone(self, worker: Worker) -> None:
        """Return once the router knows the worker no more."""

        async def is_gone() -> bool:
            return worker.worker_id not in await self._known()

        await until(is_gone, f"{worker.worker_id} gone")

    async def until_overlap(self, worker: Worker, prompt: list[int]) -> None:
        """Return once the prompt would be found at the worker."""

        async def is_found() -> bool:
            asked = {"prompt": prompt, "max_tokens": 2}
            decision = (await self.ask(worker, "/v1/route", asked)).body["decision"]
            chosen = decision["candidates"][decision["winner"]]
            return bool((chosen["worker_id"], chosen["overlap_blocks"][0]) == (worker.worker_id, PROMPT_BLOCKS))

        await until(is_found, f"{worker.worker_id} chosen")

    async def _known(self) -> dict[str, Any]:
        async with self.ground.session.get(f"{self.control_url}/v1/workers") as response:
            known = (await response.json())["workers"]
        return {each["registration"]["worker_id"]: each["unfit"] for each in known}


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return once what another process is asked is so: there is nothing to wait on."""
    try:
        async with asyncio.timeout(workers.WAIT_S):
            while not await holds():
                await SystemClock().sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {workers.WAIT_S} s: {what}") from None


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def router(ground: Ground) -> AsyncIterator[Router]:
    command = [sys.executable, "-m", "router", "--mode", "kv", "--port", "0", "--control-port", "0"]
    process = Process("router", [*command, "--nats-url", ground.nats_url, "--set", "telemetry.log_level=warning"])
    async with asyncio.TaskGroup() as group:
        await process.start(group)
        try:
            data_url = (await process.line_with("router on")).split()[2]
            yield Router(ground, data_url, (await process.line_with("control plane")).split()[2])
        finally:
            await process.end()
    assert "Traceback" not in process.output


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_the_holder_of_a_prompt_is_found_and_reuses_what_was_promised(router: Router, kind: str) -> None:
    model, start = f"routed-{kind}", KINDS[kind].start
    async with start(router.ground, "aggregated", model) as one, start(router.ground, "aggregated", model) as two:
        await router.until_fit(one, two)
        prompt = one.fresh_prompt()
        asked = {"prompt": prompt, "max_tokens": TOKENS}
        first = await router.ask(one, COMPLETIONS, asked)
        assert (first.status, first.headers["x-overlap-blocks"]) == (200, "0"), first.data
        holder = one if first.headers["x-worker-instance-id"] == one.worker_id else two
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
        await comes(lambda: prefill.is_free() and decode.is_free(), "nothing held")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_when_an_engine_dies_the_other_worker_serves(router: Router, kind: str) -> None:
    model, start = f"left-{kind}", KINDS[kind].start
    async with start(router.ground, "aggregated", model) as one, start(router.ground, "aggregated", model) as two:
        await router.until_fit(one, two)
        await one.kill()
        await router.until_gone(one)
        answered = await router.ask(two, COMPLETIONS, {"prompt": two.fresh_prompt(), "max_tokens": TOKENS})
        assert (answered.status, answered.headers["x-worker-instance-id"]) == (200, two.worker_id), answered.data
