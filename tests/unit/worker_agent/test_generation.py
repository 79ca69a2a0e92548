"""A generation as an answer: streamed it says what it says whole, whatever came at once and in whatever turn."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.openai.requests import CompletionRequest
from kv_runtime.text.byte_model import ByteText
from tests.system.integration.scripted_engine import ScriptedEngine
from worker_agent.api.answers import CompletionAnswer
from worker_agent.api.choice_text import Piece
from worker_agent.api.generation import Generation, GenerationFailed, full_pieces
from worker_agent.api.parsers.calls import AnswerOptions, AnswerParser
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Sampling, TokenLogprob, TokenLogprobs
from worker_agent.port.types import EngineOutput, EngineRequest

TEXT = ByteText()


class Saying(ScriptedEngine):
    """An engine that says the same to every request; `open` are generations that are not closed."""

    def __init__(self, outputs: Sequence[EngineOutput]) -> None:
        super().__init__()
        self._outputs = outputs
        self.open = 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        del request
        self.open += 1
        try:
            for output in self._outputs:
                yield output
        finally:
            self.open -= 1


def output(tokens: Sequence[int], choice: int = 0, **fields: Any) -> EngineOutput:
    places = tuple(TokenLogprobs(chosen=TokenLogprob(token_id=each, logprob=-each / 100)) for each in tokens)
    told: dict[str, Any] = {"token_ids": tuple(tokens), "cached_tokens": 1, "choice": choice, "logprobs": places}
    return EngineOutput(**(told | fields))


def generation(
    engine: Saying, *, choices: int = 1, stops: tuple[str, ...] = (), handoff: Handoff | None = None, **options: Any
) -> Generation:
    wishes = Sampling(choices=choices, logprobs=0)
    asked = EngineRequest(request_id="r", prompt=(1, 2), max_tokens=9, sampling=wishes, handoff=handoff)
    return Generation(engine, TEXT, [asked], stops, now_s=itertools.count().__next__, parser_of=plain, **options)


def plain(_: int) -> AnswerParser:
    return AnswerParser("a", AnswerOptions())


def collected(made: Generation) -> list[Piece]:
    async def collect() -> list[Piece]:
        async with aclosing(made.pieces()) as pieces:
            return [piece async for piece in pieces]

    return asyncio.run(collect())


def choice_of(events: bytes, choice: int) -> dict[str, Any]:
    """Return what a stream says of a choice, as a whole answer has it."""
    told = [msgspec.json.decode(event[6:])["choices"][0] for event in events.split(b"\n\n") if event]
    mine = [each for each in told if each["index"] == choice]
    columns = [each["logprobs"] for each in mine if each["logprobs"]]
    joined = {name: [each for part in columns for each in part[name]] for name in (columns[0] if columns else ())}
    text = "".join(each["text"] for each in mine)
    return {"index": choice, "text": text, "logprobs": joined or None, "finish_reason": mine[-1]["finish_reason"]}


said = st.lists(st.text("abcé€", max_size=8).map(lambda text: list(text.encode())), min_size=1, max_size=3)


@given(said, st.lists(st.text("abcé€", min_size=1, max_size=3), max_size=2).map(tuple), st.data())
def test_the_deltas_of_every_choice_joined_are_its_whole_answer(
    said: list[list[int]], stops: tuple[str, ...], data: st.DataObject
) -> None:
    outputs, left = [], dict(enumerate(said))
    while left:
        choice = data.draw(st.sampled_from(sorted(left)))
        count = len(left[choice]) - data.draw(st.integers(0, len(left[choice])))
        tokens, left[choice] = left[choice][:count], left[choice][count:]
        is_last = not left[choice] and not data.draw(st.booleans())
        outputs.append(output(tokens, choice, finish_reason="length" if is_last else None))
        if is_last:
            del left[choice]
    engine, answer = (
        Saying(outputs),
        CompletionAnswer(CompletionRequest(model="m", prompt=msgspec.Raw(b'"x"')), "7", 0, TEXT.token_bytes),
    )
    streamed = collected(generation(engine, choices=len(said), stops=stops))
    events = b"".join(answer.events(piece) for piece in streamed)
    whole = asyncio.run(full_pieces(generation(engine, choices=len(said), stops=stops).pieces()))
    expected = msgspec.json.decode(answer.full_body(whole, {}))["choices"]
    assert [choice_of(events, choice) for choice in range(len(said))] == expected
    assert engine.open == 0


def test_the_engine_is_told_once_every_choice_has_stopped() -> None:
    engine = Saying([output(b"ax", 0), output(b"b", 1), output(b"cccc", 0), output(b"bx", 1), output(b"never", 1)])
    heard = []
    made = generation(engine, choices=2, stops=("x",), on_output=lambda: heard.append(1))
    assert [piece.content for piece in collected(made)] == ["a", "b", "", "b"]
    assert (engine.open, made.usage()["completion_tokens"], len(heard)) == (0, 5, 4)


def test_the_usage_is_that_of_the_prompt_which_the_engine_computed() -> None:
    first = output(b"a", cached_tokens=3, prompt=(5, 6, 7, 8))
    made = generation(Saying([first, output(b"b", cached_tokens=3, finish_reason="length")]))
    assert [piece.prompt for piece in collected(made)] == [(), (5, 6, 7, 8)]
    assert made.usage()["prompt_tokens"] == 4
    assert made.usage()["prompt_tokens_details"] == {"cached_tokens": 3}


def test_of_a_handed_over_prompt_the_prefill_worker_s_reuse_is_reported() -> None:
    cases: list[tuple[dict[str, Any] | None, int]] = [
        ({"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}, 2),
        ({"prompt_tokens_details": {"cached_tokens": 9}}, 2),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": "2"}}, 1),
        ({"prompt_tokens": 2, "prompt_tokens_details": None}, 1),
        (None, 1),
    ]
    for usage, cached in cases:
        made = generation(Saying([output(b"a", finish_reason="length")]), handoff=Handoff(ctx_usage=usage))
        collected(made)
        assert made.usage()["prompt_tokens_details"] == {"cached_tokens": cached}, usage


def test_of_several_choices_the_first_says_what_was_cached() -> None:
    outputs = [output(b"a", 0, finish_reason="length"), output(b"b", 1, cached_tokens=2, finish_reason="length")]
    made = generation(Saying(outputs), choices=2)
    collected(made)
    assert made.usage()["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_error_of_one_choice_or_no_end_is_the_request_s() -> None:
    cases: list[list[EngineOutput]] = [
        [output(b"a"), output(b"", finish_reason="error")],
        [output(b"a"), output(b"b")],
        [output(b"a", finish_reason="stop"), output(b"", 1, finish_reason="error")],
        [],
    ]
    for outputs in cases:
        engine = Saying(outputs)
        with pytest.raises(GenerationFailed, match="the engine ended this request"):
            collected(generation(engine, choices=2))
        with pytest.raises(GenerationFailed, match="the engine ended this request"):
            asyncio.run(full_pieces(generation(engine, choices=2).pieces()))
        assert engine.open == 0, outputs
