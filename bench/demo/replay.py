"""Plays conversations against an OpenAI endpoint, and measures the latencies that users see."""

import asyncio
from collections.abc import Callable

import aiohttp

from bench.demo.workload import Conversation
from bench.streaming_client import Measured, StreamingClient
from kv_runtime.clock import Clock


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
