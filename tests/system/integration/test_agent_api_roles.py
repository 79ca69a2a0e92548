"""The agent's HTTP by role, the same over every engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kv_protocol.fleet import Role
from tests.contract.engines import IMPLEMENTATIONS
from tests.support.trtllm import Fake, trtllm
from tests.system.integration.agent_http import CHAT, COMPLETIONS, HELLO, Agent, serving

__all__ = ["trtllm"]

ASKED: dict[str, Any] = {"prompt": "hello", "max_tokens": 12}
ALONE = {"disaggregated_params": {"request_type": "context_and_generation"}}


class Fleet:
    """Agents of one kind of engine."""

    def __init__(self, fake: Fake, kind: str) -> None:
        self._start = IMPLEMENTATIONS[kind](fake)
        fake.control.model = replace(fake.control.model, vocab_size=128)  # ASCII: the text shows every token

    @asynccontextmanager
    async def agent(self, role: Role = "aggregated") -> AsyncIterator[Agent]:
        async with self._start(role) as running, serving(running.engine, drive=False, role=role) as agent:
            yield agent


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def fleet(request: pytest.FixtureRequest, trtllm: Fake) -> Fleet:
    return Fleet(trtllm, request.param)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prefill_and_a_decode_worker_say_what_one_worker_says(fleet: Fleet, path: str, streamed: bool) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "top_logprobs": 2} if path == CHAT else {"prompt": "hello"}
    asked |= {"max_tokens": 12, "stream": streamed, "logprobs": 2 if path == COMPLETIONS else True}
    async with fleet.agent("prefill") as prefill, fleet.agent("decode") as decode, fleet.agent() as alone:
        first = (await prefill.ask(path, asked)).said()
        answered = await decode.ask(path, {**asked, "disaggregated_params": first["disaggregated_params"]})
        expected = await alone.ask(path, asked)
    assert (first["finish_reason"], len(first["disaggregated_params"]["first_gen_tokens"])) == ("length", 1)
    assert (answered.status, expected.status) == (200, 200), answered.data
    said = expected.said()
    assert said["text"].startswith(first["text"])
    assert answered.said() == said


@pytest.mark.asyncio
async def test_a_decode_worker_wants_what_a_prefill_worker_said_or_is_asked_to_serve_alone(fleet: Fleet) -> None:
    async with fleet.agent("decode") as decode, fleet.agent() as aggregated:
        refused = await decode.ask(COMPLETIONS, ASKED)
        served = await decode.ask(COMPLETIONS, {**ASKED, **ALONE})
        expected = await aggregated.ask(COMPLETIONS, {**ASKED, **ALONE})
    assert (refused.status, refused.body["error"]["param"]) == (400, "disaggregated_params")
    assert "decode mode requires them" in refused.body["error"]["message"]
    assert served.said()["text"] == expected.said()["text"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("role", "params", "field"),
    [
        ("aggregated", {"request_type": "generation_only"}, "disaggregated_params.request_type"),
        ("aggregated", {"encoded_opaque_state": "/w=="}, "disaggregated_params"),
        ("prefill", {"request_type": "context_and_generation"}, "disaggregated_params.request_type"),
        ("decode", {"encoded_opaque_state": "/w=="}, "disaggregated_params.first_gen_tokens"),
        ("decode", {"encoded_opaque_state": "***"}, "disaggregated_params.encoded_opaque_state"),
        ("decode", 7, "disaggregated_params"),
    ],
)
async def test_params_that_may_not_be_are_named(fleet: Fleet, role: Role, params: Any, field: str) -> None:
    async with fleet.agent(role) as running:
        answered = await running.ask(COMPLETIONS, {**ASKED, "disaggregated_params": params})
    assert (answered.status, answered.body["error"]["param"]) == (400, field), answered.data


@pytest.mark.asyncio
async def test_a_prefill_worker_makes_one_choice_of_one_token(fleet: Fleet) -> None:
    async with fleet.agent("prefill") as prefill:
        several = await prefill.ask(COMPLETIONS, {**ASKED, "n": 2, "temperature": 0.5})
        endless = await prefill.ask(COMPLETIONS, {**ASKED, "max_tokens": 1 << 20})
    assert (several.status, several.body["error"]["param"]) == (400, "n")
    assert endless.usage["completion_tokens"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, ASKED)])
async def test_an_encode_worker_generates_nothing(fleet: Fleet, path: str, asked: dict[str, Any]) -> None:
    async with fleet.agent("encode") as running:
        answered = await running.ask(path, asked)
    assert (answered.status, answered.body["error"]["param"]) == (400, "role")
    assert "an encoder generates nothing" in answered.body["error"]["message"]
