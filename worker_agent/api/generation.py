"""One request's generation as pieces of answers, and its usage: all choices side by side, until all have ended.

    an output             here
    length, stop          the choice has ended
    error                 `GenerationFailed`: the request has failed, whatever its other choices had
    no more outputs,      likewise
    a choice still open

A choice that a stop string ends is over although the engine continues it; once all are over the engine's request is
aborted.

An answer that another worker began continues after its tokens (`before`), which are the end of the prompt here: its
text begins where that worker's ended, and its usage covers both. `take_token_ids` returns the new token ids, so that
yet another worker can resume the answer.

The prompts of one request are generated side by side, as if they were one; if one fails, all do, and are aborted.
Choice c of prompt p is choice p * n + c of the answer. Source: the OpenAI API reference, "Create completion";
vllm-project/vllm, `vllm/entrypoints/openai/completion/serving.py` (`merge_async_iterators`, the index of a choice).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from kv_runtime.text.model import Text
from worker_agent.api.answers import usage
from worker_agent.api.choice_text import ChoiceText, Piece
from worker_agent.api.parsers.calls import AnswerParser, joined
from worker_agent.port.types import Engine, EngineError, EngineOutput, EngineRequest


class GenerationFailed(EngineError):
    """The engine ended this request with an error, and continues other requests."""


class Generation:
    """One request at an engine: an engine request for each of its prompts."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        engine_requests: Sequence[EngineRequest],
        stops: tuple[str, ...],
        *,
        now_s: Callable[[], float],
        before: tuple[int, ...] = (),
        parser_of: Callable[[int], AnswerParser],
        on_output: Callable[[], None] = lambda: None,
    ) -> None:
        """`now_s` reads a monotonic clock; `parser_of` builds the parser of a choice."""
        self._now_s, self._on_output = now_s, on_output
        self._engine, self._requests, self._before = engine, engine_requests, before
        wishes = engine_requests[0].sampling
        self._choices_each = wishes.choices
        self._choices = [
            ChoiceText(choice, text, stops, parser_of(choice), with_logprobs=wishes.logprobs is not None)
            for choice in range(wishes.choices * len(engine_requests))
        ]
        if before:
            self._choices[0].resume(before)
        self._new_token_ids: list[int] = []
        self._firsts: dict[int, EngineOutput] = {}  # by prompt
        self._first_s: float | None = None
        self._cached_tokens = Counter[int]()  # by prompt

    @property
    def parsers(self) -> list[AnswerParser]:
        """The parsers of all choices."""
        return [choice.parser for choice in self._choices]

    @property
    def decode_s(self) -> float:
        """The time since the first token; 0 if none came."""
        return 0.0 if self._first_s is None else self._now_s() - self._first_s

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield a piece for each output as they come, even an empty one; closing the generator aborts the request.

        Raises:
            GenerationFailed: the engine failed this request only.
            RequestRefused, EngineStopped: as `Engine.generate`.
        """
        if not self._requests[0].max_tokens or self._choices[0].is_over:  # only the finish reason is missing
            reason = "stop" if self._choices[0].is_over else "length"
            yield Piece(finish_reason=self._choices[0].parser.finish_reason(reason))
            return
        of_prompts = [self._pieces_of(at) for at in range(len(self._requests))]
        async with aclosing(of_prompts[0] if len(of_prompts) == 1 else _merged(of_prompts)) as pieces:
            async for piece in pieces:
                yield piece

    async def _pieces_of(self, prompt: int) -> AsyncGenerator[Piece, None]:
        first = prompt * self._choices_each
        choices = self._choices[first : first + self._choices_each]
        async with aclosing(self._engine.generate(self._requests[prompt])) as outputs:
            async for output in outputs:
                yield self._piece(prompt, choices[output.choice], output)
                if all(choice.is_over for choice in choices):
                    return
        raise GenerationFailed("the engine ended this request without a reason")

    def usage(self) -> dict[str, Any]:
        """Return the usage so far, of all choices together; the reuse is the prefill worker's, if there was one."""
        prompt_tokens = cached_tokens = 0
        for at, request in enumerate(self._requests):
            computed, handoff = self._firsts[at].prompt if at in self._firsts else (), request.handoff
            isl = len(computed or request.prompt) - len(self._before)
            cached = self._cached_tokens[at]
            if handoff is not None and handoff.cached_tokens is not None:
                cached = handoff.cached_tokens
            prompt_tokens, cached_tokens = prompt_tokens + isl, cached_tokens + min(cached, isl)
        return usage(prompt_tokens, sum(choice.tokens for choice in self._choices), cached_tokens)

    def take_token_ids(self) -> list[int]:
        """Return the token ids since the last call; only for an answer of one choice."""
        token_ids, self._new_token_ids = self._new_token_ids, []
        return token_ids

    def _piece(self, prompt: int, choice: ChoiceText, output: EngineOutput) -> Piece:
        self._on_output()
        if output.finish_reason == "error" and not choice.is_over:
            raise GenerationFailed("the engine ended this request with an error; its log says why")
        if output.choice == 0:  # the others of a prompt reuse what the first one computed
            self._cached_tokens[prompt] = output.cached_tokens
        if self._first_s is None:
            self._first_s = self._now_s()
        first, request = self._firsts.setdefault(prompt, output), self._requests[prompt]
        self._new_token_ids += output.token_ids
        piece, logprobs = choice.push(output), None
        if piece.finish_reason is None:
            return piece
        if request.sampling.prompt_logprobs is not None:
            unknown = len(first.prompt or request.prompt) - len(first.prompt_logprobs)
            logprobs = (*first.prompt_logprobs, *[None] * unknown)
        return msgspec.structs.replace(piece, prompt=first.prompt, prompt_logprobs=logprobs)


async def _merged(generators: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all generators as they come; raise their first error. At the end all are closed."""
    coming: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(maxsize=len(generators))

    async def run(pieces: AsyncGenerator[Piece, None]) -> None:
        end = None
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    await coming.put(piece)
        except EngineError as error:
            end = error
        await coming.put(end)

    running = [asyncio.create_task(run(each)) for each in generators]
    try:
        left = len(running)
        while left:
            came = await coming.get()
            if isinstance(came, Exception):
                raise came
            if came is None:
                left -= 1
            else:
                yield came
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def full_pieces(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    """Return each choice's pieces as one; raise what `pieces` raises."""
    parts: dict[int, list[Piece]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            parts.setdefault(piece.choice, []).append(piece)
    return [_joined(parts[choice]) for choice in sorted(parts)]


def _joined(pieces: list[Piece]) -> Piece:
    return msgspec.structs.replace(
        next(piece for piece in pieces if piece.finish_reason is not None),
        events=tuple(joined(event for piece in pieces for event in piece.events)),
        spans=tuple(span for piece in pieces for span in piece.spans),
        handoff=next((piece.handoff for piece in pieces if piece.handoff is not None), None),
    )
