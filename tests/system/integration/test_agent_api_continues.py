"""An answer cut after any event goes on at another agent without a seam: text, log probabilities, name and usage."""

import json
from typing import Any

import pytest

from kv_protocol.continuation import HEADER, progress_of
from tests.contract.engines import IMPLEMENTATIONS
from tests.support.trtllm import Fake
from tests.system.integration.agent_http import CHAT, COMPLETIONS, HELLO, Agent, serving
from worker_agent.port.types import EngineStopped

ASKED: dict[str, Any] = {"max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}


def events_of(data: bytes) -> list[bytes]:
    """Return the stream's events, whole."""
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def said(events: list[bytes]) -> tuple[str, set[str], list[Any], list[Any]]:
    """Return text, names, usages and tokens with log probabilities of a stream."""
    told = [json.loads(event.partition(b"data: ")[2]) for event in events if b"data: {" in event]
    choices = [choice for each in told for choice in each["choices"]]
    text = "".join(each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices)
    places = [each["logprobs"] for each in choices if each["logprobs"]]
    return text, {each["id"] for each in told}, [each["usage"] for each in told if "usage" in each], places


async def stream(agent: Agent, path: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of an answer that tells its tokens."""
    answered = await agent.ask(path, body, x_kv_continuable="1")
    assert answered.status == 200, answered.data
    return events_of(answered.data)


@pytest.mark.parametrize("kind", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": "hello", "logprobs": 1}),
        (CHAT, {"messages": HELLO, "stop": ["zz", "e", " "]}),
        (CHAT, {"messages": HELLO, "min_tokens": 4}),
    ],
)
async def test_a_stream_goes_on_behind_any_of_its_events(
    trtllm: Fake, kind: str, path: str, body: dict[str, Any]
) -> None:
    async with IMPLEMENTATIONS[kind](trtllm)() as running, serving(running.engine, drive=False) as agent:
        whole = await stream(agent, path, ASKED | body)
        text, names, usages, places = said(whole)
        for cut in range(1, len(whole) + 1):
            progress = progress_of(b"".join(whole[:cut]))
            if progress is None or progress.finish_reason is not None:
                continue
            rest = await stream(agent, path, ASKED | body | {"kv_continue": json.loads(progress.continuation())})
            found = said(whole[:cut] + rest)
            assert found[:2] == (text, names), cut
            assert [each["completion_tokens"] for each in found[2]] == [each["completion_tokens"] for each in usages]
            assert found[3] == places
            assert not [event for event in rest if b'"role"' in event]
    assert (len(names), len(usages)) == (1, 1)


async def test_an_answer_of_which_all_was_said_only_ends(trtllm: Fake) -> None:
    async with IMPLEMENTATIONS["simulated"](trtllm)() as running, serving(running.engine, drive=False) as agent:
        whole = await stream(agent, COMPLETIONS, ASKED | {"prompt": "hello"})
        progress = progress_of(b"".join(whole[:-3]))
        assert progress is not None
        assert progress.token_count == 12
        rest = await stream(
            agent, COMPLETIONS, ASKED | {"prompt": "hello", "kv_continue": json.loads(progress.continuation())}
        )
    assert (said(rest)[0], b'"finish_reason":"length"' in b"".join(rest)) == ("", True)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"kv_continue": {"tokens": "!", "id": "a", "created": 1}}, "kv_continue.tokens"),
        ({"kv_continue": {"tokens": "AAA=", "id": "a", "created": 1}}, "kv_continue.tokens"),
        ({"kv_continue": {"tokens": "", "id": "a", "created": 1}}, "kv_continue.tokens"),
        ({"kv_continue": {"tokens": "AAAAAA==", "id": "a"}}, "kv_continue.created"),
        ({"n": 2, "kv_continue": {"tokens": "BwAAAA==", "id": "a", "created": 1}}, "n"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused(trtllm: Fake, changed: dict[str, Any], param: str) -> None:
    async with IMPLEMENTATIONS["simulated"](trtllm)() as running, serving(running.engine, drive=False) as agent:
        answered = await agent.ask(COMPLETIONS, ASKED | {"prompt": "hello"} | changed)
    assert (answered.status, json.loads(answered.data)["error"]["param"]) == (400, param)


async def test_a_stream_that_tells_nothing_has_no_comments(trtllm: Fake) -> None:
    async with IMPLEMENTATIONS["simulated"](trtllm)() as running, serving(running.engine, drive=False) as agent:
        answered = await agent.ask(COMPLETIONS, ASKED | {"prompt": "hello"})
    assert b": tokens" not in answered.data


async def test_a_stream_that_tells_its_tokens_is_cut_where_the_engine_stops(trtllm: Fake) -> None:
    async with IMPLEMENTATIONS["simulated"](trtllm)() as running, serving(running.engine, drive=False) as agent:
        generate = running.engine.generate

        async def stops(request: Any) -> Any:
            async for output in generate(request):
                yield output
                raise EngineStopped("gone")

        running.engine.generate = stops  # type: ignore[method-assign]
        told = f"{HEADER}: 1\r\nConnection: close\r\n".encode()
        reader, writer = await agent.open(COMPLETIONS, ASKED | {"prompt": "hello"}, told)
        received = await reader.read()
        writer.close()
    assert b"data: {" in received
    assert b"error" not in received
    assert not received.endswith(b"0\r\n\r\n")
