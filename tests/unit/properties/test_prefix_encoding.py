"""A chat with a cached beginning has the ids that it has without the cache. Planted bugs are found."""

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64
from kv_protocol.hashing import Hashing, sequence_hashes, unpack_tokens
from kv_protocol.openai.requests import CHAT, decode_inbound
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import choose_encoder
from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt import EncodedPrompt, ModelPrompts, PromptLimits, chat_encoding, prefix_cache
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
from tests.unit.properties.test_text_prefix import SPELLINGS, TOKENIZER_TEXT

CALM = settings(max_examples=examples(60))
PLANTED = settings(CALM, max_examples=examples(1000), derandomize=True, database=None, phases=[Phase.generate])
HASHING = Hashing(4)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<|im_end|> \u00fc"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}


def model(kind: str) -> TokenizerText:
    if kind == "awkward":
        return TOKENIZER_TEXT
    tokenizer = llama_like() if kind == "llama" else qwen_like()
    end = "<|eot_id|>" if kind == "llama" else "<|im_end|>"
    template = ChatTemplate(
        {"default": LLAMA_TEMPLATE if kind == "llama" else QWEN_TEMPLATE},
        {"bos_token": "<|begin_of_text|>", "eos_token": end},
    )
    return TokenizerText(tokenizer, "", template, choose_encoder(tokenizer, tokenizer.to_str().encode()))


MODELS = {kind: model(kind) for kind in ("llama", "qwen", "awkward")}
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


def wrong_turn(text: TokenizerText, asked: Sequence[Turn], cache_bytes_max: int = 1 << 20) -> str:
    """Return the first turn of which the prompt is not that of the whole chat; empty: all are."""
    prompts, chat = ModelPrompts(text, PromptLimits(cache_bytes_max=cache_bytes_max)), list[dict[str, Any]]()
    for turn in asked:
        chat = [*chat[: turn.kept], *turn.more]
        body = json.dumps({"model": "m", "messages": chat, **turn.options}).encode()
        made = prompts.prompt(decode_inbound(CHAT, body), HASHING)
        assert isinstance(made, EncodedPrompt)
        expected = text.pack_chat(chat, **turn.options)
        if made.ids != expected:
            return f"ids of {chat}"
        if made.sequence_hashes != pack_u64(sequence_hashes(unpack_tokens(expected), HASHING.block_size)):
            return f"hashes of {chat}"
        if made.encoded != base64.b64encode(expected):
            return f"base64 of {chat}"
    return ""


@pytest.fixture(params=[1, 256])
def stretch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Stretches as short as can be, so that chats are cut everywhere; and as they are."""
    monkeypatch.setattr(chat_encoding, "STRETCH_CHARACTERS", request.param)
    return int(request.param)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("cache_bytes_max", [1 << 20, 3000])
def test_a_known_beginning_changes_no_id(kind: str, cache_bytes_max: int, stretch: int) -> None:
    @settings(CALM)
    @given(turns)
    def holds(asked: list[Turn]) -> None:
        assert wrong_turn(MODELS[kind], asked, cache_bytes_max) == ""

    assert stretch
    holds()


# ---------------------------------------------------------------- the harness finds mistakes


def found_wrong(kind: str) -> str:
    text = MODELS[kind]
    asked = find(turns, lambda asked: wrong_turn(text, asked) != "", settings=PLANTED)
    return wrong_turn(text, asked)


@pytest.mark.planted
def test_a_cut_counted_in_characters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = chat_encoding.encode_chat

    def mistaken(text: TokenizerText, rendered: bytes, known: prefix_cache.Known | None) -> prefix_cache.CachedChat:
        chat = encode(text, rendered, known)
        lost = len(rendered) - len(rendered.decode())
        cuts = tuple(cut._replace(at=cut.at - lost, mark_end=cut.mark_end - lost) for cut in chat.cuts)
        return prefix_cache.CachedChat(chat.text, chat.ids, chat.encoded, cuts)

    monkeypatch.setattr("router.prompt.prompts.encode_chat", mistaken)
    assert found_wrong("qwen")
