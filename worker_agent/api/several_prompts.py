"""The generations of one request with several prompts, side by side, as if they were one.

Choice c of prompt p is choice p * n + c of the answer. Source: the OpenAI API reference, "Create completion";
vllm-project/vllm, `vllm/entrypoints/openai/completion/serving.py` (`merge_async_iterators`, the index of a choice).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from worker_agent.api.answers import usage
from worker_agent.api.choice_text import Piece
from worker_agent.api.generation import Generation, full_pieces
from worker_agent.api.parsers.answer import AnswerParser
from worker_agent.port.sampling import TokenLogprobs
from worker_agent.port.types import EngineError, RequestRefused


class SeveralPrompts:
    """A generation for each prompt, of `choices` choices each."""

    prompt: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    parsers: Sequence[AnswerParser] = ()

    def __init__(self, generations: Sequence[Generation], choices: int) -> None:
        self._generations, self._choices = generations, choices

    @property
    def decode_s(self) -> float:
        """The time since the first token; 0 if none came."""
        return max(each.decode_s for each in self._generations)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all as they come; closing the generator aborts all. Raises as `Generation.pieces`."""
        coming: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(maxsize=len(self._generations))

        async def run(at: int, generation: Generation) -> None:
            end = None
            try:
                async with aclosing(generation.pieces()) as own:
                    async for piece in own:
                        await coming.put(msgspec.structs.replace(piece, choice=at * self._choices + piece.choice))
            except (EngineError, RequestRefused) as error:
                end = error
            await coming.put(end)

        running = [asyncio.create_task(run(*each)) for each in enumerate(self._generations)]
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

    async def full_pieces(self) -> list[Piece]:
        """Return each choice as one piece; raise as `pieces`."""
        return await full_pieces(self.pieces(), len(self._generations) * self._choices)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far, of all prompts together."""
        each = [generation.usage() for generation in self._generations]
        cached = sum(of["prompt_tokens_details"]["cached_tokens"] for of in each)
        return usage(sum(of["prompt_tokens"] for of in each), sum(of["completion_tokens"] for of in each), cached)

    def take_token_ids(self) -> list[int]:
        """Return none: no other worker resumes several choices."""
        return []
