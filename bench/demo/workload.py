"""A multi-turn workload: conversations with assistants, some with the same system prompt; and its player.

Each conversation sends its full history every turn, so turn k's prompt begins with turn k - 1's prompt and answer.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import aiohttp

from bench.streaming_client import Measured, StreamingClient
from kv_runtime.clock import Clock

_WORDS = (
    "cache",
    "block",
    "prefix",
    "route",
    "token",
    "worker",
    "index",
    "event",
    "stream",
    "batch",
    "engine",
    "answer",
)


class WorkloadShape(NamedTuple):
    """Sizes in conversations, turns, or bytes (one byte is one token of the byte tokenizer); times in seconds."""

    conversations: int = 20
    turns: int = 5
    assistants: int = 6
    system_bytes: int = 2000
    question_bytes: int = 1200
    answer_tokens: int = 24
    think_s: float = 1.8
    arrival_s: float = 0.5
    """Mean time between the beginnings of conversations."""


class Conversation(NamedTuple):
    """One person's questions: when the first is sent, and how long the person thinks after each answer."""

    starts_s: float
    system: str
    questions: tuple[str, ...]
    thinks_s: tuple[float, ...]


def conversations(shape: WorkloadShape, seed: int) -> Iterator[Conversation]:
    """Yield the same conversations for the same seed."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    systems = [f"You are assistant {n}. " + _text(draw, shape.system_bytes) for n in range(shape.assistants)]
    starts_s = 0.0
    for _ in range(shape.conversations):
        yield Conversation(
            starts_s,
            draw.choice(systems),
            tuple(_text(draw, shape.question_bytes) for _ in range(shape.turns)),
            tuple(draw.expovariate(1 / shape.think_s) for _ in range(shape.turns)),
        )
        starts_s += draw.expovariate(1 / shape.arrival_s)


def _text(draw: random.Random, size: int) -> str:
    words: list[str] = []
    length = 0
    while length < size:
        words.append(draw.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


class Player:
    """Plays conversations side by side against one endpoint."""

    def __init__(self, base_url: str, model: str, clock: Clock, on_request: Callable[[], None] = lambda: None) -> None:
        self._base_url = base_url
        self._model = model
        self._clock = clock
        self._on_request = on_request

    async def play(self, conversations: list[Conversation], answer_tokens: int) -> list[Measured]:
        """Return the measurements of all requests, once all conversations are over."""
        began_s = self._clock.now()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            client = StreamingClient(session, self._base_url, self._clock, began_s=began_s)
            talks = [group.create_task(self._talk(client, each, answer_tokens)) for each in conversations]
        return sorted(measured for talk in talks for measured in talk.result())

    async def _talk(self, client: StreamingClient, talk: Conversation, answer_tokens: int) -> list[Measured]:
        await self._clock.sleep(talk.starts_s)
        messages = [{"role": "system", "content": talk.system}]
        measured = []
        for question, think_s in zip(talk.questions, talk.thinks_s, strict=True):
            messages.append({"role": "user", "content": question})
            body = {"model": self._model, "messages": messages, "max_tokens": answer_tokens}
            answer, measurement = await client.send("/v1/chat/completions", body)
            measured.append(measurement)
            self._on_request()
            messages.append({"role": "assistant", "content": answer})
            await self._clock.sleep(think_s)
        return measured
