"""A completion of several prompts at an agent: each prompt's choices in their order, as one answer."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.system.integration.agent_http import COMPLETIONS, Answered, serving
from tests.system.integration.broker import eventually
from tests.system.integration.scripted_engine import ScriptedEngine
from worker_agent.port.types import EngineOutput, EngineRequest, EngineStopped

PROMPTS = [[1, 2, 3], [4, 5], [6]]


class Echo(ScriptedEngine):
    """An engine that makes two tokens for each choice, both the prompt's last one; `fails` has a prompt that fails."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.running, self._fails = 0, fails

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self.running += 1
        try:
            if request.prompt == self._fails:
                raise EngineStopped("the engine stopped")
            token = (96 + request.prompt[-1],)
            for choice in range(request.sampling.choices):
                yield EngineOutput(choice=choice, token_ids=token, cached_tokens=1)
                if self._fails:
                    await asyncio.Event().wait()
                yield EngineOutput(choice=choice, token_ids=token, cached_tokens=1, finish_reason="length")
        finally:
            self.running -= 1


async def ask(**body: Any) -> Answered:
    async with serving(Echo(), drive=False) as agent:
        return await agent.ask(COMPLETIONS, {"prompt": PROMPTS, "max_tokens": 2, **body})


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_prompt_has_its_choices_and_all_are_counted(streamed: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    answered = await ask(n=2, **options)
    assert [answered.said(choice)["text"] for choice in range(6)] == ["cc", "cc", "ee", "ee", "ff", "ff"]
    assert {answered.said(choice)["finish_reason"] for choice in range(6)} == {"length"}
    usage = answered.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


async def test_what_is_of_one_prompt_only_is_refused() -> None:
    answered = await ask(prompt_logprobs=1)
    assert (answered.status, answered.body["error"]["param"]) == (400, "prompt_logprobs")


async def test_where_one_prompt_fails_all_fail_and_the_others_are_aborted() -> None:
    engine = Echo(fails=(4, 5))
    async with serving(engine, drive=False) as agent:
        answered = await agent.ask(COMPLETIONS, {"prompt": PROMPTS})
        assert (answered.status, answered.body["error"]["code"]) == (503, "engine_stopped")
        await eventually(lambda: engine.running == 0)
