"""What is told of prompts, as metrics."""

import json
from pathlib import Path

from structlog.testing import capture_logs

from kv_protocol.hashing import Hashing
from kv_protocol.openai.requests import CHAT, decode_inbound
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import CONFIGURED, HfEncoder
from kv_runtime.text.loading import load_text
from kv_runtime.text.tokenizer_model import TokenizerText
from router.metrics.prompts import prompt_families
from router.prompt import ModelPrompts
from tests.unit.kv_runtime.model_files import QWEN_TEMPLATE, qwen_like, write_model

TURN = {"role": "user", "content": "hello"}


def test_known_and_new_text_of_a_growing_chat_is_counted(tmp_path: Path) -> None:
    prompts = ModelPrompts(load_text(write_model(tmp_path, qwen_like(), QWEN_TEMPLATE, eos_token="<|im_end|>"), "auto"))
    registry = new_registry()
    Projection(registry, lambda: prompt_families(prompts.statistics()))
    for turns in (1, 2):
        body = json.dumps({"model": "m", "messages": [TURN] * turns}).encode()
        prompts.prompt(decode_inbound(CHAT, body), Hashing(4))
    first, second = (b"<|im_start|>user\nhello<|im_end|>\n" * turns for turns in (1, 2))
    answer = b"<|im_start|>assistant\n"
    sampled = {
        name: registry.get_sample_value(f"kvrouter_{name}") for name in ("chat_cache_chats", "prompts_off_loop_total")
    }
    assert sampled == {"chat_cache_chats": 2, "prompts_off_loop_total": 0}
    assert registry.get_sample_value("kvrouter_chat_bytes_total", {"part": "known"}) == len(first)
    new = len(first) + len(answer) + len(second) + len(answer) - len(first)
    assert registry.get_sample_value("kvrouter_chat_bytes_total", {"part": "new"}) == new
    encoders = {name: registry.get_sample_value("kvrouter_encoder_info", {"encoder": name}) for name in ("hf", "fast")}
    assert encoders == {"hf": 0, "fast": 1}


def test_images_are_told_by_whether_they_were_seen() -> None:
    prompts, registry = ModelPrompts(ByteText()), new_registry()
    Projection(registry, lambda: prompt_families(prompts.statistics()))
    image = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image, image]}]}).encode()
    prompts.prompt(decode_inbound(CHAT, body), Hashing(4))
    told = {seen: registry.get_sample_value("kvrouter_prompt_images_total", {"seen": seen}) for seen in ("yes", "no")}
    assert told == {"yes": 0, "no": 2}


def test_a_model_that_could_not_have_the_fast_encoder_is_told_in_the_log() -> None:
    tokenizer, template = qwen_like(), ChatTemplate({"default": QWEN_TEMPLATE}, {})
    with capture_logs() as told:
        ModelPrompts(TokenizerText(tokenizer, "", template, HfEncoder(tokenizer, CONFIGURED)))
        ModelPrompts(TokenizerText(tokenizer, "", template, HfEncoder(tokenizer, "it encodes 'x' otherwise")))
    assert told == [{"event": "encoder_not_fast", "reason": "it encodes 'x' otherwise", "log_level": "warning"}]
