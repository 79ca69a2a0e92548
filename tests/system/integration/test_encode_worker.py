"""An encode worker over HTTP: what a prefill or aggregated worker gets of it, in both forms, and what it is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_body, openai_errors
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part
from tests.support.manual_clock import ManualClock
from tests.support.parts import at_work
from tests.support.paths import ROOT
from tests.support.trtllm import Fake
from tests.system.integration.test_media_engine import (
    TOKENS_PER_IMAGE,
    Model,
    chat,
    model,
    picture,
    prompt_of,
    words,
    worker,
)
from tests.system.integration.test_media_fetch import ENDLESS, OK
from tests.system.integration.test_trtllm_engine import running
from tests.unit.router.samples import MODEL
from tests.unit.router.upstream import Script, Upstream, says
from tests.unit.worker_agent.media_samples import GIF, PNG, data_url, image_part, refused
from tests.unit.worker_agent.test_encode_workers import encoder, followed
from worker_agent.api.bodies import engine_refusal
from worker_agent.api.encode_endpoint import EncodeApi
from worker_agent.api.prompts import EnginePrompts
from worker_agent.commands.serve import media_families
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.media.config import MediaSection
from worker_agent.media.encode_client import ANSWER_BYTES_MAX, PATH, EncodeClient, Form
from worker_agent.media.image_models import ImageFacts
from worker_agent.media.inputs import digest_words
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import MediaPart, content_digest
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import EncoderUnavailable

__all__ = ["model"]

TOKEN = "secret"
NO_EMBEDDINGS = msgspec.msgpack.encode({"digests": ["0" * 64], "embeddings": [b"no file of embeddings"]})
PARTS = (MediaPart(field="messages[0].content[0].image_url.url", url=data_url(PNG)),)


class EncodeWorker:
    """A running encode worker, and clients of it."""

    def __init__(self, model: Model, engine: TensorRTLLMEngine, served: str = MODEL, **rules: Any) -> None:
        self.model, self.engine = model, engine
        self.facts = ImageFacts(placeholder="<image>", image_token_id=model.token)
        self.loader = MediaLoader(MediaSection(**rules))
        self.api = EncodeApi(
            engine, self.loader, self.facts, cache_bytes_max=1 << 20, served_names=(served,), inflight_requests_max=2
        )
        app = web.Application(middlewares=[openai_errors, require_token(TOKEN)], client_max_size=1 << 20)
        app.add_routes(self.api.routes())
        self.server = HttpServer(app, "127.0.0.1", 0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def prompts(self, client: EncodeClient) -> EnginePrompts:
        """The prompts of a worker that asks this one."""
        return EnginePrompts(self.model.text, MediaLoader(MediaSection()), self.facts, client)


@asynccontextmanager
async def client_of(*urls: str, form: Form = "handles", **fields: Any) -> AsyncIterator[EncodeClient]:
    told: dict[str, Any] = {"model": MODEL, "form": form, "token": TOKEN} | fields
    client = EncodeClient(ManualClock(), **told)
    async with followed(client, *(encoder(f"w{at}", base_url=url) for at, url in enumerate(urls))):
        yield client


@asynccontextmanager
async def encoding(model: Model, **rules: Any) -> AsyncIterator[EncodeWorker]:
    async with running(worker(model, "encode")) as engine:
        made = EncodeWorker(model, engine, **rules)
        await made.server.start()
        async with at_work(Part("http", made.server.run, 0)):
            yield made


@asynccontextmanager
async def asking(made: EncodeWorker, form: Form = "handles", **fields: Any) -> AsyncIterator[EnginePrompts]:
    async with client_of(*fields.pop("urls", (made.url,)), form=form, **fields) as client:
        yield made.prompts(client)


# ---------------------------------------------------------------------------------------------- encoded
async def test_handles_come_with_the_digests_of_the_very_bytes(model: Model) -> None:
    async with encoding(model) as made, asking(made) as prompts:
        prompt = await prompt_of(prompts, words("two:"), picture(), picture(GIF))
    assert prompt.media == ()
    assert prompt.handoff is not None
    assert prompt.handoff.multimodal_hashes == tuple(digest_words(content_digest(data)) for data in (PNG, GIF))
    assert made.api.in_flight.requests_total == {"ok": 1, "refused": 0, "failed": 0, "cancelled": 0}


async def test_embeddings_are_computed_once_and_sent_each_time(model: Model) -> None:
    async with encoding(model) as made, asking(made, "embeddings") as prompts:
        for parts in ((picture(),), (picture(), picture(GIF)), (picture(GIF), picture(GIF))):
            prompt = await prompt_of(prompts, *parts)
            assert [each.tensor and each.tensor.shape for each in prompt.media] == [(TOKENS_PER_IMAGE, 8)] * len(parts)
        cache = made.api.cache
        assert (cache.misses_total, cache.hits_total) == (2, 2)
        families = media_families("w", made.loader, None, made.api)
        told = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}
        assert told["kvrouter_embedding_cache_bytes", "w"] == cache.size_bytes > 0
        assert told["kvrouter_embedding_lookups_total", "w", "hit"] == 2
        assert told["kvrouter_encode_requests_total", "w", "ok"] == 3
        assert told["kvrouter_media_loaded_total", "w", "image"] == 5
        documented = (ROOT / "docs" / "TENSORRT_LLM.md").read_text()
        assert [name for name, *_ in told if name not in documented and "media" not in name] == []


# ---------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("form", ["handles", "embeddings"])
async def test_a_refusal_of_media_is_the_client_s_own_with_its_field_and_reason(model: Model, form: Form) -> None:
    async with encoding(model) as made, asking(made, form) as prompts:
        for url, reason in (
            ("https://10.0.0.1/a.png", "url_scheme"),
            (data_url(b"no"), "content"),
            ("/etc/passwd", "path_outside"),
        ):
            with pytest.raises(MediaRefused) as caught:
                await prompt_of(prompts, words("see"), image_part(url))
            assert refused(caught) == reason
            assert caught.value.field == "messages[0].content[1].image_url.url"
            assert str(caught.value).count("allowed") == 1
        refused_total = list(media_families("w", made.loader, None, None))[-1].samples
        reasons = {each.labels["reason"]: each.value for each in refused_total}
        assert reasons == {"url_scheme": 1, "content": 1, "path_outside": 1}
        assert made.api.in_flight.requests_total["refused"] == 3


async def test_more_than_are_encoded_at_a_time_are_sent_away(trtllm: Fake, model: Model) -> None:
    async with encoding(model) as made, asking(made) as prompts:
        trtllm.control.hold()
        waiting = {asyncio.ensure_future(prompts.prompts(chat(picture()))) for _ in range(3)}
        (sent_away,), others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(EncoderUnavailable, match=r"inflight_requests_max") as caught:
            await sent_away
        answered, outcome = engine_refusal(caught.value)
        assert isinstance(answered, web.Response)
        assert answered.body == error_body(str(caught.value), "server_error", code="encoder_unavailable")
        assert (answered.status, answered.headers["Retry-After"], outcome) == (503, "1", "failed")
        trtllm.control.release()
        await asyncio.gather(*others)
        assert made.api.in_flight.requests_total == {"ok": 2, "refused": 1, "failed": 0, "cancelled": 0}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"token": "wrong"}, "401"),
        ({"urls": ("http://127.0.0.1:1",)}, "ClientConnectorError"),
        ({"urls": ()}, "no encode worker of m takes requests"),
    ],
)
async def test_what_is_not_the_client_s_fault_is_no_refusal(model: Model, fields: Any, said: str) -> None:
    async with encoding(model) as made, asking(made, **fields) as prompts:
        with pytest.raises(EncoderUnavailable, match=said):
            await prompt_of(prompts, picture())


async def test_another_model_is_no_refusal(model: Model) -> None:
    async with encoding(model, served="other") as made, asking(made) as prompts:
        with pytest.raises(EncoderUnavailable, match='404: model: found "m", allowed other'):
            await prompt_of(prompts, picture())


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "m", "form": "handles", "prompt": "<image>", "media": []}',
        b'{"model": "m", "form": "handles", "prompt": "<image>", "media": [{"field": "f", "url": "u"}], "more": 1}',
        b'{"model": "m", "form": "handles", "prompt": "no place", "media": [{"field": "f", "url": "/a"}]}',
    ],
)
async def test_a_question_that_cannot_be_read_is_refused(model: Model, body: bytes) -> None:
    async with encoding(model) as made, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.post(made.url + PATH, data=body, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"]
        assert made.api.in_flight.requests_total["refused"] == 1


@pytest.mark.parametrize("form", ["handles", "embeddings"])
@pytest.mark.parametrize(
    "script",
    [
        ENDLESS,
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
        says(b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"digests":["a"]'),
        says(OK + b"Content-Length: %d\r\n\r\n" % len(NO_EMBEDDINGS) + NO_EMBEDDINGS),
        says(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n"),
        says(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"),
        says(b"nonsense\r\n\r\n"),
    ],
)
async def test_an_encode_worker_that_speaks_otherwise_is_unavailable(
    script: Script, form: Form, monkeypatch: Any
) -> None:
    monkeypatch.setitem(ANSWER_BYTES_MAX, form, 1 << 20)
    async with Upstream(script) as at, client_of(at.base_url, form=form) as client:
        with pytest.raises(EncoderUnavailable):
            await client.encode("<image>", PARTS)


@pytest.mark.parametrize("form", ["handles", "embeddings"])
async def test_where_one_encode_worker_fails_another_is_asked(model: Model, form: Form) -> None:
    async with (
        encoding(model) as made,
        Upstream(says(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")) as failing,
        client_of("http://127.0.0.1:1", failing.base_url, made.url, form=form) as client,
    ):
        for _ in range(2):
            (prompt,) = await made.prompts(client).prompts(chat(picture()))
            assert (prompt.handoff is not None) == (form == "handles")
        assert client.attempts_total == {"failed": 2, "ok": 2}


async def test_media_that_are_refused_are_not_sent_to_another_encode_worker(model: Model) -> None:
    async with encoding(model) as made, client_of(made.url, "http://127.0.0.1:1") as client:
        with pytest.raises(MediaRefused):
            await made.prompts(client).prompts(chat(image_part(data_url(b"no"))))
        assert client.attempts_total == {"refused": 1}
