"""Media of served workers, put together as `serve` does: an encode worker, and another one that asks it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kv_protocol.fleet import Role
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.images import FixedTokens, ImageRule
from kv_runtime.clock import SystemClock
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import openai_errors
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part
from tests.contract.engines import outputs, tokens_of
from tests.support.parts import at_work
from tests.support.trtllm import trtllm
from tests.system.integration.test_media_engine import (
    TOKENS_PER_IMAGE,
    Model,
    asked,
    model,
    picture,
    prompt_of,
    words,
    worker,
)
from tests.system.integration.test_trtllm_engine import running
from tests.unit.router.samples import MODEL
from tests.unit.worker_agent.test_encode_workers import encoder, fleet_log
from worker_agent.commands.served_media import ServedMedia
from worker_agent.config import AgentSettings
from worker_agent.media.config import ImageModelSection

__all__ = ["model", "trtllm"]

TOKEN = "secret"


def served(model: Model, role: Role, **sections: Any) -> ServedMedia:
    return ServedMedia(
        AgentSettings(**sections), model.text, SystemClock(), model=MODEL, model_path=model.path, role=role
    )


async def wait(stop: asyncio.Event) -> None:
    await stop.wait()


@asynccontextmanager
async def started(media: ServedMedia, *parts: Part, encoders: tuple[str, ...] = ()) -> AsyncIterator[ServedMedia]:
    await media.start()
    log = fleet_log(*(encoder(f"w{at}", base_url=url) for at, url in enumerate(encoders)))
    try:
        async with at_work(*parts, Part("test", wait), *media.parts(0, log, FleetGate())):
            if encoders:
                await log.followed.wait()
            yield media
    finally:
        await media.close()


@asynccontextmanager
async def encode_worker(model: Model) -> AsyncIterator[str]:
    async with running(worker(model, "encode")) as engine:
        media = served(model, "encode")
        app = web.Application(middlewares=[openai_errors, require_token(TOKEN)])
        app.add_routes(media.encode_api(engine, served_names=(MODEL,), inflight_requests_max=4).routes())
        server = HttpServer(app, "127.0.0.1", 0)
        await server.start()
        async with started(media, Part("http", server.run)):
            yield f"http://127.0.0.1:{server.port}"
        names = {family.name for family in media.families("w")}
        assert {"kvrouter_media_refused", "kvrouter_encode_requests", "kvrouter_embedding_offers"} <= names


@pytest.mark.parametrize("form", ["handles", "embeddings"])
async def test_a_worker_asks_an_encode_worker_of_the_fleet(model: Model, form: str) -> None:
    parts = (words("see"), picture())
    async with encode_worker(model) as url, running(worker(model)) as engine:
        sections = {"encode": {"form": form}, "worker": {"token": TOKEN}}
        async with started(served(model, "aggregated", **sections), encoders=(url,)) as media:
            prompt = await prompt_of(media.prompts, *parts)
            (asked_total,) = [each for each in media.families("w") if each.name == "kvrouter_encode_attempts"]
        assert [(sample.labels["outcome"], sample.value) for sample in asked_total.samples] == [("ok", 1)]
        assert (prompt.handoff is None) == (form == "embeddings")
        told = await outputs(engine, asked(prompt))
        assert tokens_of(told) == tokens_of(await outputs(engine, asked(await prompt_of(model.prompts, *parts), "b")))


async def test_a_worker_of_its_own_moves_no_embeddings(model: Model) -> None:
    media = served(model, "aggregated", images=ImageModelSection(tokens_per_image=TOKENS_PER_IMAGE))
    assert media.parts(0, fleet_log(), FleetGate()) == ()
    assert media.rule == ImageRule(placeholder="<image>", image_token_id=model.token, tokens=FixedTokens(8))
    assert len((await prompt_of(media.prompts, picture())).media) == 1
    assert [family.name for family in media.families("w")] == [
        "kvrouter_media_loaded", "kvrouter_media_loaded_bytes", "kvrouter_media_refused",
    ]  # fmt: skip
