"""Images through an agent's HTTP and TensorRT-LLM's engine over the fake: as clients ask, and see refusals."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kv_protocol.fleet import Role
from kv_runtime.telemetry import new_registry
from tests.support.trtllm import trtllm
from tests.system.integration.agent_http import CHAT, COMPLETIONS, nowhere
from tests.system.integration.serving import Api, serving
from tests.system.integration.test_media_engine import TOKENS_PER_IMAGE, Model, model, worker
from tests.system.integration.test_trtllm_engine import QUICK, TRANSFER, running
from tests.unit.worker_agent.media_samples import GIF, PNG, data_url, image_part
from worker_agent.api.app import AgentApi

__all__ = ["model", "trtllm"]


@asynccontextmanager
async def agent(model: Model, role: Role = "aggregated") -> AsyncIterator[Api]:
    arguments = {} if role == "aggregated" else TRANSFER
    async with running(worker(model, role, QUICK, arguments)) as engine:
        ids = iter(f"id{number}" for number in range(1000))
        api = AgentApi(
            engine,
            model.text,
            model.prompts,
            served_names=("m",),
            default_max_tokens=4,
            inflight_requests_max=8,
            wall_ns=lambda: 0,
            now_s=time.monotonic,
            new_id=lambda: next(ids),
            position=nowhere,
            status=dict,
            role=role,
        )
        async with serving(api.app(new_registry(), token="", body_bytes_max=1 << 20)) as served:
            yield served


def asked(*parts: Any, **fields: Any) -> bytes:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


def picture(data: bytes = PNG) -> dict[str, Any]:
    return image_part(data_url(data, "image/gif" if data == GIF else "image/png"))


async def test_an_image_is_answered_and_its_tokens_are_counted_and_reused(model: Model) -> None:
    async with agent(model) as served:
        status, first = await served.post(asked("see", picture()), CHAT)
        _, text = await served.post(asked("see"), CHAT)
        _, again = await served.post(asked("see", picture()), CHAT)
    assert (status, len(first["choices"][0]["message"]["content"]) > 0) == (200, True)
    assert first["usage"]["prompt_tokens"] > text["usage"]["prompt_tokens"] + TOKENS_PER_IMAGE
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= TOKENS_PER_IMAGE


async def test_what_is_refused_has_its_field_and_spares_the_engine(model: Model) -> None:
    cases = [
        (CHAT, asked(image_part("https://10.0.0.1/a.png")), "messages[0].content[0].image_url.url"),
        (CHAT, asked("see", image_part("/etc/passwd")), "messages[0].content[1].image_url.url"),
        (CHAT, asked("see <image>", picture()), "messages[0].content[0].text"),
        (CHAT, asked("see <image>"), "messages"),
        (COMPLETIONS, b'{"model": "m", "prompt": "see <image>"}', "prompt"),
    ]
    async with agent(model) as served:
        for path, body, field in cases:
            status, told = await served.post(body, path)
            assert (status, told["error"]["param"]) == (400, field)


async def test_streams_go_on_while_media_are_placed(model: Model) -> None:
    async with agent(model) as served:
        answers = await asyncio.gather(
            *(served.post(asked(f"number {at}", picture() if at % 2 else "no picture"), CHAT) for at in range(6))
        )
    assert [status for status, _ in answers] == [200] * 6
