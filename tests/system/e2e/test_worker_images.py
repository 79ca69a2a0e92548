"""Whole workers that see images: one encodes them, one computes the prompt, one decodes, and all say what one says."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_protocol.fleet import Role
from kv_runtime.text.loading import load_text
from tests.contract.worker_kinds import served, served_settings
from tests.contract.worker_router import routing
from tests.contract.worker_runs import Executors, small_model, trtllm_arguments
from tests.contract.workers import Ground, Worker, comes, ground
from tests.support.image_model import write_image_model
from tests.system.integration.agent_http import CHAT
from tests.unit.worker_agent.media_samples import GIF, PNG, data_url, image_part
from worker_agent.engine_args.arguments import EngineOptions

__all__ = ["ground"]

MODEL = "sees"
TOKENS_PER_IMAGE = 8


class Illustrated:
    """Starts workers of the fake's engine, with a model that takes images."""

    def __init__(self, ground: Ground, directory: Path) -> None:
        self._ground = ground
        self.path, self._image_token = write_image_model(directory)
        self._vocab_size = load_text(self.path).vocab_size

    @asynccontextmanager
    async def worker(self, role: Role, model: str = MODEL, *assignments: str) -> AsyncIterator[Worker]:
        ground, executors = self._ground, Executors(self._ground)
        own = ["engine.kind=trtllm", f"engine.served_names=[{model}]", f"engine.text={self.path}"]
        own += [f"images.tokens_per_image={TOKENS_PER_IMAGE}", "trtllm.transfer_s=0.2"]
        settings = served_settings(ground, ground.name("sees"), role, [*own, *assignments])
        override, is_multimodal = json.dumps({"model": "none", **trtllm_arguments(role)}), role != "encode"
        options = EngineOptions(override=override, publishes_kv_events=is_multimodal, is_multimodal=is_multimodal)
        with small_model(ground):
            control = ground.fake.control
            control.model = replace(control.model, vocab_size=self._vocab_size, image_token_id=self._image_token)
            async with served(ground, settings, options, model, executors.kill) as worker:
                yield worker


def asked(*pictures: bytes) -> dict[str, Any]:
    """Return a chat about these pictures, longer than a few blocks."""
    parts = [image_part(data_url(each, "image/gif" if each is GIF else "image/png")) for each in pictures]
    words = {"type": "text", "text": "what is the difference between these two, and which of them is the older one?"}
    return {"messages": [{"role": "user", "content": [words, *parts]}], "max_tokens": 8}


@pytest.mark.parametrize("form", ["handles", "embeddings"])
@pytest.mark.asyncio(loop_scope="module")
async def test_behind_a_router_encode_prefill_and_decode_workers_say_what_one_worker_says(
    ground: Ground, tmp_path: Path, form: str
) -> None:
    sees, model = Illustrated(ground, tmp_path), ground.name(MODEL)
    async with (
        sees.worker("aggregated", "alone") as alone,
        sees.worker("encode", model) as encode,
        sees.worker("prefill", model, f"encode.form={form}") as prefill,
        sees.worker("decode", model) as decode,
        routing(ground, sees.path) as router,
    ):
        await router.until_fit(prefill, decode)
        for pictures in ((PNG,), (PNG, GIF)):
            expected = (await alone.ask(CHAT, asked(*pictures))).said()["text"]
            for streamed in (False, True):
                answered = await router.ask(decode, CHAT, asked(*pictures) | {"stream": streamed})
                assert (answered.status, answered.said()["text"]) == (200, expected), answered.data
                assert answered.headers["x-worker-instance-id"] == decode.worker_id
        encoded = f'kvrouter_encode_requests_total{{outcome="ok",worker="{encode.worker_id}"}}'
        assert (await encode.figures())[encoded] == 4
        asked_for = f'kvrouter_encode_attempts_total{{outcome="ok",worker="{prefill.worker_id}"}}'
        assert (await prefill.figures())[asked_for] == 4
        await comes(lambda: prefill.is_free() and decode.is_free(), "nothing held")
