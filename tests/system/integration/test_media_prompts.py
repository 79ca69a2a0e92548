"""From a client's chat to a prompt with media, the whole way: what is taken, and each thing that is not."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kv_protocol.hashing import pack_tokens
from kv_protocol.openai.requests import ChatRequest, CompletionRequest
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from tests.support.image_model import PLACEHOLDER, write_image_model
from tests.unit.worker_agent.media_samples import GIF, PNG, data_url, image_part, refused
from worker_agent.api.prompts import EnginePrompts
from worker_agent.api.request_rules import NOTHING_ASKED
from worker_agent.media.config import ImageModelSection, MediaSection
from worker_agent.media.image_models import image_facts
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import content_digest
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import EngineRequest


@dataclass
class Worker:
    """The prompts of a worker, and what its loader counts."""

    text: Text
    token: int
    loader: MediaLoader
    prompts: EnginePrompts

    async def prompt(self, request: ChatRequest | CompletionRequest) -> EngineRequest:
        (prompt,) = await self.prompts.prompts(request)
        return prompt

    async def refusal(self, request: ChatRequest | CompletionRequest) -> tuple[str, str]:
        """Return why, and the field; it is counted once."""
        before = self.loader.refused_total.total()
        with pytest.raises(MediaRefused) as caught:
            await self.prompts.prompts(request)
        reason = refused(caught)
        assert self.loader.refused_total.total() == before + 1
        return reason, caught.value.field


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    return write_image_model(tmp_path_factory.mktemp("model"))


def worker(model: tuple[str, int]) -> Worker:
    text, loader = load_text(model[0]), MediaLoader(MediaSection())
    facts = image_facts(model[0], text, ImageModelSection())
    return Worker(text, model[1], loader, EnginePrompts(text, loader, facts))


def chat(*parts: Any, **fields: Any) -> ChatRequest:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return ChatRequest(model="m", messages=[{"role": "user", "content": content}], **fields)


# ---------------------------------------------------------------------------------------------- taken
async def test_a_chat_with_images_is_text_with_a_token_for_each_and_the_media(model_path: Any) -> None:
    made = worker(model_path)
    parts = ("see", image_part(data_url(PNG)), "and", image_part(data_url(GIF, "image/gif")))
    prompt = await made.prompt(chat(*parts))
    assert prompt.text is not None
    assert prompt.text == f"<|im_start|>user\nsee\n{PLACEHOLDER}\nand\n{PLACEHOLDER}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.prompt.count(made.token) == 2
    assert list(prompt.prompt) == made.text.encode(prompt.text, add_special_tokens=False)
    assert [media.digest for media in prompt.media] == [content_digest(PNG), content_digest(GIF)]
    assert made.loader.loaded_total == {"image": 2}


async def test_the_worker_s_own_tokens_win_where_there_are_media(model_path: Any) -> None:
    made = worker(model_path)
    routed = await made.prompt(chat("see", image_part(data_url(PNG)), kv_prompt_ids=pack_tokens([5, 6])))
    assert routed == await made.prompt(chat("see", image_part(data_url(PNG))))
    assert (await made.prompt(chat("see", kv_prompt_ids=pack_tokens([5, 6])))).prompt == (5, 6)


async def test_a_prompt_that_another_worker_computed_is_taken_as_it_is(model_path: Any) -> None:
    made = worker(model_path)
    given = msgspec.Raw(msgspec.json.encode([made.token] * 9))
    prompt = await made.prompt(chat(image_part("https://10.0.0.1/a.png"), prompt_token_ids=given))
    assert prompt == msgspec.structs.replace(NOTHING_ASKED, prompt=(made.token,) * 9)


# -------------------------------------------------------------------------------------------- refused
async def test_a_model_without_images_takes_none(model_path: Any) -> None:
    made = worker(model_path)
    alone = EnginePrompts(made.text, made.loader, None)
    with pytest.raises(MediaRefused) as caught:
        await alone.prompts(chat(image_part(data_url(PNG))))
    assert (refused(caught), caught.value.field) == ("text_only", "messages")
    assert made.loader.refused_total == {"text_only": 1}
    assert (await alone.prompts(chat("hello")))[0].media == ()


@pytest.mark.parametrize(
    "request_",
    [
        ChatRequest(model="m", messages=[{"role": "user", "content": f"see {PLACEHOLDER}"}]),
        chat(f"see {PLACEHOLDER}"),
        chat(f"see {PLACEHOLDER}", image_part(data_url(PNG))),
        CompletionRequest(model="m", prompt=msgspec.Raw(msgspec.json.encode(f"see {PLACEHOLDER}"))),
    ],
)
async def test_text_that_says_it_is_an_image_is_refused(model_path: Any, request_: Any) -> None:
    assert (await worker(model_path).refusal(request_))[0] == "placeholder"


async def test_token_ids_with_image_tokens_are_refused_from_any_sender(model_path: Any) -> None:
    made = worker(model_path)
    for request in (
        CompletionRequest(model="m", prompt=msgspec.Raw(msgspec.json.encode([1, made.token]))),
        chat("see", kv_prompt_ids=pack_tokens([made.token])),
    ):
        assert (await made.refusal(request))[0] == "placeholder"
