"""Plays a workload against an OpenAI endpoint, and measures the latencies that users see."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
import msgspec

from bench.demo.workload import Conversation
from kv_runtime.clock import Clock

_DATA = b"data: "


class Measured(NamedTuple):
    """One request. `sent_s` counts from the workload's start; times are in wall seconds."""

    sent_s: float
    worker: str
    decision_id: str
    prompt_tokens: int
    cached_tokens: int
    predicted_blocks: int
    ttft_s: float
    duration_s: float
    error: str = ""


class Player:
    """Plays conversations side by side against one endpoint."""

    def __init__(self, base_url: str, model: str, clock: Clock, on_request: Callable[[], None] = lambda: None) -> None:
        self._url = f"{base_url}/v1/chat/completions"
        self._model = model
        self._clock = clock
        self._on_request = on_request
        self._began_s = clock.now()

    async def play(self, conversations: list[Conversation], answer_tokens: int) -> list[Measured]:
        """Return the measurements of all requests, once all conversations are over."""
        self._began_s = self._clock.now()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            talks = [group.create_task(self._talk(session, each, answer_tokens)) for each in conversations]
        return sorted(measured for talk in talks for measured in talk.result())

    async def _talk(self, session: aiohttp.ClientSession, talk: Conversation, answer_tokens: int) -> list[Measured]:
        await self._clock.sleep(talk.starts_s)
        messages = [{"role": "system", "content": talk.system}]
        measured = []
        for question, think_s in zip(talk.questions, talk.thinks_s, strict=True):
            messages.append({"role": "user", "content": question})
            answer, measurement = await self._request(session, messages, answer_tokens)
            measured.append(measurement)
            self._on_request()
            messages.append({"role": "assistant", "content": answer})
            await self._clock.sleep(think_s)
        return measured

    async def _request(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], answer_tokens: int
    ) -> tuple[str, Measured]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s, reading = self._clock.now(), _Reading()
        async with session.post(self._url, data=msgspec.json.encode(body)) as response:
            async for line in response.content:
                if line.startswith(_DATA):
                    reading.on_event(line[len(_DATA) :].strip(), self._clock.now())
            headers = response.headers
            if response.status != 200:  # noqa: PLR2004
                reading.error = f"status {response.status}"
        return reading.text, Measured(
            sent_s=sent_s - self._began_s,
            worker=headers.get("x-worker-instance-id", ""),
            decision_id=headers.get("x-decision-id", ""),
            prompt_tokens=reading.prompt_tokens,
            cached_tokens=reading.cached_tokens,
            predicted_blocks=int(headers.get("x-overlap-blocks", "0")),
            ttft_s=(reading.first_s or self._clock.now()) - sent_s,
            duration_s=self._clock.now() - sent_s,
            error=reading.error,
        )


class _Reading:
    """One streamed answer as it comes."""

    def __init__(self) -> None:
        self.text = self.error = ""
        self.first_s: float | None = None
        self.prompt_tokens = self.cached_tokens = 0

    def on_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            self.error = event["error"]["message"]
        elif event["choices"]:
            self.first_s = self.first_s or now_s
            self.text += event["choices"][0]["delta"].get("content", "")
        elif event.get("usage"):
            self.prompt_tokens = event["usage"]["prompt_tokens"]
            self.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
