"""Doubles of engines that compute prompts: they keep blocks, publish them over ZeroMQ, and say what they reused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from kv_runtime.text.byte_model import ByteText
from tests.contract.engine_servers import vllm_payload
from tests.support.chat_ids import chat_ids
from tests.system.integration.engine_doubles import EngineDouble, SglangDouble, VllmDouble
from tests.system.integration.event_path import endpoint_of
from worker_agent.events.engine_events import EngineStored

_TEXT = ByteText()


class Computing(EngineDouble):
    """Tokens are bytes. Without `is_telling` nothing is published."""

    is_telling = True

    @asynccontextmanager
    async def computing(self, context: zmq.asyncio.Context) -> AsyncIterator[Self]:
        """It answers, and publishes at `events`."""
        self.held = set[int]()
        self._sequence = 0
        self._publish = context.socket(zmq.PUB)
        self._publish.bind("tcp://127.0.0.1:*")
        self.events = endpoint_of(self._publish)
        async with self.serving():
            yield self

    async def computed(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = chat_ids(_TEXT, body["messages"]) if "messages" in body else _TEXT.encode(body["prompt"])
        size, names = self.block_size, list[int]()
        for end in range(size, len(ids) + 1, size):
            names.append(xxh3_64_intdigest(msgspec.json.encode(ids[:end])) >> 1)
        cached = next((at for at, name in enumerate(names) if name not in self.held), len(names))
        if cached < len(names):
            self.held.update(names)
            stored = EngineStored(
                block_hashes=tuple(names[cached:]),
                parent_block_hash=names[cached - 1] if cached else None,
                token_ids=tuple(ids[cached * size : len(names) * size]),
                block_size=size,
            )
            await self._tell(vllm_payload(stored))
        details = {"cached_tokens": min(cached * size, (len(ids) - 1) // size * size)}
        return {"prompt_tokens": len(ids), "prompt_tokens_details": details}

    async def _tell(self, payload: bytes) -> None:
        if self.is_telling:
            await self._publish.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
            self._sequence += 1


class ComputingVllm(Computing, VllmDouble):
    """Such a vLLM, which says nowhere what it publishes at."""


class ComputingSglang(Computing, SglangDouble):
    """Such an SGLang, which says it."""

    @asynccontextmanager
    async def computing(self, context: zmq.asyncio.Context) -> AsyncIterator[Self]:
        """It answers, and publishes at `events`."""
        async with super().computing(context) as engine:
            stated = {"publisher": "zmq", "topic": "", "endpoint": self.events.replace("127.0.0.1", "*")}
            self.kv_events_config = msgspec.json.encode(stated).decode() if self.is_telling else None
            yield engine
