"""Media in TensorRT-LLM's engine, over the fake package: what its events say is what is hashed of the request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import pytest

from kv_protocol.hashing import chain, expanded, mm_block_hashes
from kv_protocol.openai.requests import ChatRequest
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from tests.contract.engines import BLOCK_SIZE, outputs, tokens_of, trtllm_engine
from tests.support.image_model import write_image_model
from tests.support.trtllm import Fake
from tests.system.integration.test_trtllm_engine import QUICK, TRANSFER, running
from tests.unit.worker_agent.media_samples import GIF, PNG, SAFETENSORS, data_url, image_part
from worker_agent.api.prompts import EnginePrompts
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.mirror import RankMirror
from worker_agent.media.config import ImageModelSection, MediaSection
from worker_agent.media.image_models import image_facts
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import content_digest, embeddings_media
from worker_agent.media.safetensors import read_tensor, written_tensor
from worker_agent.port.types import EngineOutput, EngineRequest, Media, RequestRefused

TOKENS_PER_IMAGE = 8
EMPTY = TrtllmSettings()


@dataclass
class Model:
    """The model on both sides: the agent's text, and the fake engine's facts."""

    path: str
    token: int
    text: Text
    prompts: EnginePrompts


@pytest.fixture
def model(trtllm: Fake, tmp_path: Any) -> Model:
    path, token = write_image_model(tmp_path)
    text = load_text(path)
    trtllm.control.model = replace(trtllm.control.model, vocab_size=text.vocab_size, image_token_id=token)
    facts = image_facts(path, text, ImageModelSection())
    loader = MediaLoader(MediaSection())
    return Model(path, token, text, EnginePrompts(text, loader, facts))


def worker(
    model: Model, role: str = "aggregated", settings: TrtllmSettings = EMPTY, arguments: Any = None
) -> TensorRTLLMEngine:
    return trtllm_engine({"model": model.path, **(arguments or {})}, settings, role=role, is_multimodal=True)


def chat(*parts: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{"role": "user", "content": list(parts)}])


def picture(data: bytes = PNG) -> dict[str, Any]:
    return image_part(data_url(data, "image/gif" if data == GIF else "image/png"))


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def prompt_of(prompts: EnginePrompts, *parts: Any) -> EngineRequest:
    """Return the only prompt of a chat with these parts."""
    (prompt,) = await prompts.prompts(chat(*parts))
    return prompt


def asked(prompt: EngineRequest, name: str = "a", **fields: Any) -> EngineRequest:
    return msgspec.structs.replace(prompt, **{"request_id": name, "max_tokens": 4} | fields)


def hashes_of(prompt: EngineRequest, token: int, digests: list[str]) -> list[int]:
    tokens, runs = expanded(prompt.prompt, token, digests, [TOKENS_PER_IMAGE] * len(digests))
    return chain(mm_block_hashes(tokens, runs, BLOCK_SIZE))


def held_by(engine: TensorRTLLMEngine) -> list[int]:
    mirror = RankMirror(BLOCK_SIZE)
    for _, published in TrtllmRules(BLOCK_SIZE).translate(engine.kv_events(5.0)):
        mirror.apply(published)
    return [held.sequence_hash for held in mirror.dump()]


def cached(told: list[EngineOutput]) -> int:
    return told[-1].cached_tokens


@pytest.mark.parametrize("form", ["text", "tokens"])
async def test_the_engine_s_events_are_hashed_as_the_request_is(model: Model, form: str) -> None:
    parts = (words("two:"), picture(), words("and"), picture(GIF), words("which?"))
    prompt = await prompt_of(model.prompts, *parts)
    fields: dict[str, Any] = {} if form == "text" else {"text": None}
    async with running(worker(model)) as engine:
        told = await outputs(engine, asked(prompt, max_tokens=1, **fields))
        hashes = hashes_of(prompt, model.token, [content_digest(PNG), content_digest(GIF)])
        assert held_by(engine)[: len(hashes)] == hashes
    assert len(hashes) > 5
    assert told[0].prompt.count(model.token) == 2 * TOKENS_PER_IMAGE


async def test_events_of_the_second_cache_manager_agree_up_to_the_image(model: Model) -> None:
    prompt = await prompt_of(model.prompts, words("a long text before it"), picture(), words("what?"))
    cache = {
        "tokens_per_block": BLOCK_SIZE,
        "use_kv_cache_manager_v2": True,
        "kv_cache_event_hash_algo": "v2_sha256_64",
    }
    async with running(worker(model, arguments={"kv_cache_config": cache})) as engine:
        await outputs(engine, asked(prompt, max_tokens=1))
        held = held_by(engine)
    hashes, before = (
        hashes_of(prompt, model.token, [content_digest(PNG)]),
        prompt.prompt.index(model.token) // BLOCK_SIZE,
    )
    assert before > 1
    assert held[:before] == hashes[:before]  # behind it the engine numbers the image's tokens, which the fake does not


async def test_without_the_fast_path_token_ids_become_the_same_prompt(trtllm: Fake, model: Model) -> None:
    trtllm.control.model = replace(trtllm.control.model, image_token_id=None)
    prompt = await prompt_of(model.prompts, words("look"), picture())
    async with running(worker(model)) as engine:
        by_text = await outputs(engine, asked(prompt))
        by_tokens = await outputs(engine, asked(prompt, "b", text=None))
        given = await outputs(engine, asked(prompt, "c", media=(embeddings(),)))
        again = await outputs(engine, asked(prompt, "d", text=None, media=(embeddings(),)))
    for one, other in ((by_text, by_tokens), (given, again)):
        assert one[0].prompt == other[0].prompt
        assert tokens_of(one) == tokens_of(other)
        assert cached(other) > 0
    assert cached(by_tokens) >= TOKENS_PER_IMAGE  # by the image's UUID


async def test_an_image_that_cannot_be_decoded_fails_its_request_alone(model: Model) -> None:
    prompt = await prompt_of(model.prompts, picture())
    (media,) = prompt.media
    cut = Media(field=media.field, media_type="image/png", data=PNG[:20], digest=media.digest)
    async with running(worker(model)) as engine:
        with pytest.raises(RequestRefused, match=r"image_url.url: found \"image/png \(OSError\)\""):
            await outputs(engine, asked(prompt, media=(cut,)))
        assert len(tokens_of(await outputs(engine, asked(prompt)))) == 4
        assert engine.fault is None


async def test_media_are_placed_while_others_are_served_and_a_stop_waits_for_none(trtllm: Fake, model: Model) -> None:
    prompt = await prompt_of(model.prompts, picture())
    engine = worker(model)
    await engine.start()
    trtllm.control.hold()
    waiting = asyncio.ensure_future(outputs(engine, asked(prompt)))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="request_id"):
        await outputs(engine, asked(prompt))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await engine.stop(0.0)
    assert trtllm.control.executors == []


# ------------------------------------------------------------------------------------------- embeddings
def embeddings(fill: float = 1.0) -> Media:
    data = written_tensor("F32", (3, 2), bytes(memoryview(bytearray(24))) if not fill else SAFETENSORS[-24:])
    return embeddings_media("f", data)


async def test_embeddings_take_their_rows_and_never_another_s_blocks(model: Model) -> None:
    prompt = await prompt_of(model.prompts, words("look at this one"), picture())
    async with running(worker(model)) as engine:
        told = await outputs(engine, asked(prompt, media=(embeddings(),)))
        assert told[0].prompt.count(model.token) == 3
        assert cached(await outputs(engine, asked(prompt, "b", media=(embeddings(),)))) > 0
        assert cached(await outputs(engine, asked(prompt, "c", media=(embeddings(0.0),)))) == 0


# ----------------------------------------------------------------------------------------- encode, prefill, decode
@asynccontextmanager
async def three(model: Model, first: str) -> AsyncIterator[tuple[TensorRTLLMEngine, ...]]:
    encoder = worker(model, "encode")
    async with (
        running(encoder) as one,
        running(worker(model, first, QUICK, TRANSFER)) as two,
        running(worker(model, "decode", arguments=TRANSFER)) as three,
    ):
        yield one, two, three


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
async def test_an_encoder_s_embeddings_are_files_that_another_worker_takes(
    trtllm: Fake, model: Model, dtype: str
) -> None:
    trtllm.control.model = replace(trtllm.control.model, embedding_dtype=dtype)
    prompt = await prompt_of(model.prompts, picture(), words("what?"))
    assert prompt.text is not None
    async with three(model, "aggregated") as (encode, aggregated, _):
        (data,) = await encode.embeddings(prompt.text, prompt.media)
        tensor = read_tensor(data, "f")
        assert (tensor.dtype, tensor.shape) == ({"torch.float16": "F16"}.get(dtype, "BF16"), (TOKENS_PER_IMAGE, 8))
        media = embeddings_media("f", data)
        told = await outputs(aggregated, asked(prompt, media=(media,)))
    assert told[0].prompt.count(model.token) == TOKENS_PER_IMAGE


async def test_positions_of_a_model_with_mrope_go_with_the_handles_and_not_with_embeddings(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = await prompt_of(model.prompts, picture(), words("what?"))
    assert prompt.text is not None
    positions = {"mrope_position_ids_handle": {"a": 1}, "mrope_position_deltas_handle": {"b": 2}}
    result = import_module("tensorrt_llm.executor.result")
    monkeypatch.setattr(result, "DisaggregatedParams", partial(result.DisaggregatedParams, **positions))
    async with running(worker(model, "encode")) as encode:
        handoff = await encode.encode(prompt.text, prompt.media)
        assert {name: getattr(handoff, name) for name in positions} == positions
        with pytest.raises(RequestRefused, match=r"^form: found \"embeddings\", allowed handles"):
            await encode.embeddings(prompt.text, prompt.media)
