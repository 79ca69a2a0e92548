"""A chat template that is given in place of the one in the model's directory."""

from pathlib import Path

import pytest

from kv_runtime.text.chat_template import TextError
from kv_runtime.text.loading import load_text
from kv_runtime.text.tokenizer_model import TokenizerText
from tests.unit.kv_runtime.model_files import LLAMA_TEMPLATE, llama_like, write_model

CHAT = [{"role": "user", "content": "hi"}]
OTHER = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(name="model")
def model_directory(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    return write_model(tmp_path / "model", llama_like(), LLAMA_TEMPLATE, bos_token="<|begin_of_text|>")


@pytest.fixture(name="other")
def other_template(tmp_path: Path) -> str:
    file = tmp_path / "other.jinja"
    file.write_text(OTHER)
    return str(file)


def test_chats_are_rendered_by_it_with_the_model_s_special_tokens(model: str, other: str) -> None:
    assert load_text(model, chat_template=other).render_chat(CHAT) == "<|begin_of_text|>hi"


def test_the_template_s_digest_follows_and_the_tokenizer_s_does_not(model: str, other: str) -> None:
    own, instead = load_text(model), load_text(model, chat_template=other)
    assert own.template_digest != instead.template_digest
    assert own.tokenizer_digest == instead.tokenizer_digest


def test_the_same_text_is_the_same_digest_wherever_it_stands(model: str, other: str) -> None:
    instead = load_text(model, chat_template=other).template_digest
    (Path(model) / "chat_template.jinja").write_text(OTHER)
    assert load_text(model).template_digest == instead


def test_a_directory_without_a_template_gets_one(model: str, other: str) -> None:
    (Path(model) / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TextError, match="chat_template"):
        load_text(model).render_chat(CHAT)
    assert load_text(model, chat_template=other).render_chat(CHAT) == "hi"


def test_a_file_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(TextError, match=r"/nowhere\.jinja"):
        load_text(model, chat_template="/nowhere.jinja")


def test_the_byte_model_has_its_own(other: str) -> None:
    with pytest.raises(TextError, match=r"chat_template: found .*, allowed none"):
        load_text("byte", chat_template=other)


def test_the_begin_token_is_the_template_s(model: str) -> None:
    text = load_text(model)
    assert isinstance(text, TokenizerText)
    assert text.bos_id == text.special_ids["<|begin_of_text|>"]
    assert load_text("byte").bos_id is None
