"""Turns of a chat extend each other token by token: what makes a KV cache worth keeping, and a text worth cutting."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.chat_messages import Message
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import Encoder
from kv_runtime.text.model import Text
from kv_runtime.text.tokenizer_model import TokenizerText
from tests.support.amount import examples
from tests.support.chat_ids import chat_ids
from tests.support.planting import plant

CALM = settings(max_examples=examples(150))
PLANTED = settings(CALM, max_examples=examples(20_000), derandomize=True, database=None)
BYTE = ByteText()
MARKS = list(BYTE.special_ids)
SPECIALS = ["<|a|>", "<|a|>>", ">x", "<|end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|a|>' + m.role + m.content + '<|end|>' }}\n{% endfor %}"


def awkward_tokenizer() -> Tokenizer:
    """Return a byte-level model whose added tokens are as awkward as they come.

    They begin and overlap one another, swallow spaces, want to be words, are not special, or come after the others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello world <|end|> <|a|> tool_call"], trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<word>", single_word=True)])
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("a<|a|>", normalized=True)])
    return tokenizer


def tokenizer_text() -> TokenizerText:
    tokenizer = awkward_tokenizer()
    return TokenizerText(tokenizer, "", ChatTemplate({"default": TEMPLATE}, {}), Encoder(tokenizer, ""))


TOKENIZER_TEXT = tokenizer_text()

SPELLINGS = [*SPECIALS, "<mask>", "<word>", "<call>", " ", "a", "x", "|>"]
awkward = st.lists(st.sampled_from(SPELLINGS), max_size=6).map("".join)
words = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from([*MARKS, "\n", "<|", "é"])).map("".join),
    awkward,
)
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    words,
)
chats = st.lists(messages, max_size=6)


def begins(shorter: Sequence[int], longer: Sequence[int]) -> bool:
    return list(longer[: len(shorter)]) == list(shorter)


@CALM
@given(chats, st.integers(0, 6))
def test_the_first_messages_tokens_begin_the_chats(chat: list[Message], count: int) -> None:
    assert begins(chat_ids(BYTE, chat[:count], add_generation_prompt=False), chat_ids(BYTE, chat))


@CALM
@given(chats, words, chats)
def test_a_turn_and_its_answer_begin_the_next_turn(chat: list[Message], answer: str, more: list[Message]) -> None:
    output = [*BYTE.encode(answer), *BYTE.eos_ids]
    answered = {"role": "assistant", "content": BYTE.decode(output)}
    assert begins(chat_ids(BYTE, chat) + output, chat_ids(BYTE, [*chat, answered, *more]))


@CALM
@given(chats)
def test_only_the_template_writes_marks(chat: list[Message]) -> None:
    marks = [token for token in chat_ids(BYTE, chat, add_generation_prompt=False) if token > 255]
    assert marks[1::2] == [BYTE.special_ids["<|end|>"]] * len(chat)
    assert len(marks) == 2 * len(chat)


def encodes_as_a_whole(text: TokenizerText, content: str) -> bool:
    rendered = text.render_chat([{"role": "user", "content": content}])
    places = [0, *(begin for begin, _ in text.mark_spans(rendered)), len(rendered)]
    parts = [text.pack_marked(rendered[begin:end]) for begin, end in pairwise(places)]
    return b"".join(parts) == text.pack_marked(rendered)


@settings(CALM, max_examples=examples(500))
@given(st.one_of(awkward, words))
def test_parts_encode_as_the_whole_chat_does(content: str) -> None:
    assert encodes_as_a_whole(TOKENIZER_TEXT, content)


def test_the_template_writes_marks_that_text_is_cut_at() -> None:
    rendered = TOKENIZER_TEXT.render_chat([{"role": "user", "content": "hello<|end|>"}] * 2)
    assert [rendered[begin:end] for begin, end in TOKENIZER_TEXT.mark_spans(rendered)] == [
        "<|a|>",
        "<|end|>",
        "<|end|>",
    ] * 2


@pytest.mark.parametrize("token", ["<mask>", "<word>", ">x", "a<|a|>"])
def test_a_cut_at_the_wrong_token_would_be_found(token: str) -> None:
    broken = tokenizer_text()
    plant(broken, "_marks", re.compile(re.escape(token)))
    find(awkward, lambda content: not encodes_as_a_whole(broken, content), settings=PLANTED)


@pytest.mark.parametrize("text", [BYTE, TOKENIZER_TEXT], ids=["byte", "tokenizer"])
@CALM
@given(data=st.data())
def test_pushed_text_is_the_decoded_text(text: Text, data: st.DataObject) -> None:
    ids = text.encode(data.draw(words))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    detokenizer = text.detokenizer()
    told = [detokenizer.push(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join([*told, detokenizer.flush()]) == text.decode(ids)


@CALM
@given(st.lists(st.integers(0, 300)))
def test_pushed_bytes_are_the_decoded_bytes_even_if_broken(ids: list[int]) -> None:
    detokenizer = BYTE.detokenizer()
    assert "".join([*(detokenizer.push([token]) for token in ids), detokenizer.flush()]) == BYTE.decode(ids)
