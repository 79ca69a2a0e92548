"""What is told of prompts, as metrics."""

import asyncio
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kv_protocol.body_limits import Body
from kv_protocol.hashing import Hashing
from kv_protocol.openai.requests import CHAT, decode_inbound
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import CONFIGURED, Encoder, Wanted
from kv_runtime.text.loading import load_text
from kv_runtime.text.tokenizer_model import TokenizerText
from router.metrics import prompt_families
from router.prompt.prompts import ModelPrompts
from tests.unit.kv_runtime.model_files import QWEN_TEMPLATE, qwen_like, write_model

TURN = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(("wanted", "known", "new"), [("hf", 88, 55), ("fast", 32, 21)])
def test_known_and_new_text_of_a_growing_chat_is_counted(tmp_path: Path, wanted: Wanted, known: int, new: int) -> None:
    """Three segments are new, the five of the second turn are known; fastokens counts them without their marks."""
    prompts = ModelPrompts(load_text(write_model(tmp_path, qwen_like(), QWEN_TEMPLATE, eos_token="<|im_end|>"), wanted))
    registry = new_registry()
    Projection(registry, lambda: prompt_families(prompts))
    for turns in (1, 2):
        body = json.dumps({"model": "m", "messages": [TURN] * turns}).encode()
        prompts.prompt(Body(body), decode_inbound(CHAT, body), Hashing(4))
    told = [registry.get_sample_value("kvrouter_encoder_bytes_total", {"part": part}) for part in ("known", "new")]
    assert told == [known, new]
    assert registry.get_sample_value("kvrouter_encoder_cache_segments") == 3
    encoders = {name: registry.get_sample_value("kvrouter_encoder_info", {"encoder": name}) for name in ("hf", "fast")}
    assert encoders == {name: name == wanted for name in ("hf", "fast")}


async def test_images_are_told_by_whether_they_were_seen() -> None:
    prompts, registry = ModelPrompts(ByteText()), new_registry()
    Projection(registry, lambda: prompt_families(prompts))
    image = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image, image]}]}).encode()
    made = prompts.prompt(Body(body), decode_inbound(CHAT, body), Hashing(4))
    assert isinstance(made, asyncio.Future)
    await made
    told = {seen: registry.get_sample_value("kvrouter_prompt_images_total", {"seen": seen}) for seen in ("yes", "no")}
    assert told == {"yes": 0, "no": 2}


def test_a_model_that_could_not_have_the_fast_encoder_is_told_in_the_log() -> None:
    tokenizer, template = qwen_like(), ChatTemplate({"default": QWEN_TEMPLATE}, {})
    with capture_logs() as told:
        ModelPrompts(TokenizerText(tokenizer, "", template, Encoder(tokenizer, CONFIGURED)))
        ModelPrompts(TokenizerText(tokenizer, "", template, Encoder(tokenizer, "it encodes 'x' otherwise")))
    assert told == [{"event": "encoder_not_fast", "reason": "it encodes 'x' otherwise", "log_level": "warning"}]
