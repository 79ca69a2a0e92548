"""A chat of which segments were encoded before has the ids of the whole chat, with either encoder."""

import json
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.body_limits import Body
from kv_protocol.codec import pack_u64
from kv_protocol.hashing import Hashing, pack_tokens, sequence_hashes
from kv_protocol.openai.requests import CHAT, decode_inbound
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import Wanted, choose_encoder
from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt.chains import EncodedPrompt
from router.prompt.prompts import ModelPrompts
from tests.support.amount import examples
from tests.unit.kv_runtime.model_files import (
    LLAMA_MARKS,
    LLAMA_TEMPLATE,
    QWEN_CALLS,
    QWEN_MARKS,
    QWEN_TEMPLATE,
    llama_like,
    qwen_like,
)
from tests.unit.properties.test_text_prefix import SPELLINGS, TEMPLATE, awkward_tokenizer

CALM = settings(max_examples=examples(60, least=10))
HASHING = Hashing(4)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<|im_end|> \u00fc"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}


MODELS = {
    "llama": (llama_like(), LLAMA_TEMPLATE, "<|eot_id|>"),
    "qwen": (qwen_like(), QWEN_TEMPLATE, "<|im_end|>"),
    "awkward": (awkward_tokenizer(), TEMPLATE, "<|end|>"),
}


@cache
def text_of(kind: str, wanted: Wanted) -> TokenizerText:
    tokenizer, template, end = MODELS[kind]
    chats = ChatTemplate({"default": template}, {"bos_token": "<|begin_of_text|>", "eos_token": end})
    return TokenizerText(tokenizer, "", chats, choose_encoder(tokenizer, tokenizer.to_str().encode(), wanted))


said = st.lists(
    st.one_of(
        st.sampled_from(
            [*LLAMA_MARKS, *QWEN_MARKS, *QWEN_CALLS, *SPELLINGS, "\n", "  ", "hello world", "é", "e\u0301", "日本"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    max_size=5,
).map("".join)
messages = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), said),
    said.map(lambda content: {"role": "assistant", "content": content, "tool_calls": [CALL]}),
    said.map(lambda content: {"role": "tool", "content": content}),
)


class Turn(NamedTuple):
    """One request: so many messages of what was said so far are kept, and more are said."""

    kept: int
    more: list[dict[str, Any]]
    options: dict[str, Any]


OPTIONS: list[dict[str, Any]] = [{}, {}, {"tools": TOOLS}, {"add_generation_prompt": False}]
turns = st.lists(
    st.builds(Turn, st.integers(0, 12), st.lists(messages, min_size=1, max_size=3), st.sampled_from(OPTIONS)),
    min_size=2,
    max_size=8,
)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("wanted", ["hf", "auto"])
@pytest.mark.parametrize("cache_bytes_max", [1 << 20, 3000])
def test_a_known_segment_changes_no_id(kind: str, wanted: Wanted, cache_bytes_max: int) -> None:
    tokenizer = MODELS[kind][0]

    @settings(CALM)
    @given(turns)
    def holds(asked: list[Turn]) -> None:
        text, chat = text_of(kind, wanted), list[dict[str, Any]]()
        prompts = ModelPrompts(text, cache_bytes_max=cache_bytes_max)
        for turn in asked:
            chat = [*chat[: turn.kept], *turn.more]
            body = json.dumps({"model": "m", "messages": chat, **turn.options}).encode()
            made = prompts.prompt(Body(body), decode_inbound(CHAT, body), HASHING)
            assert isinstance(made, EncodedPrompt)
            expected = tokenizer.encode(text.render_chat(chat, **turn.options), add_special_tokens=False).ids
            assert made.ids == pack_tokens(expected)
            assert made.sequence_hashes == pack_u64(sequence_hashes(expected, HASHING.block_size))
        assert prompts.encoder is not None
        assert prompts.encoder.kept().bytes <= cache_bytes_max

    holds()
