"""Vocabularies that rank their tokens: tiktoken's and Mistral's tekken are encoded as those libraries do."""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.loading import load_text
from kv_runtime.text.ranked_tokens import spelt_bytes
from kv_runtime.text.tokenizer_model import TokenizerText
from tests.support.amount import examples
from tests.support.chat_ids import chat_ids
from tests.unit.kv_runtime.model_files import (
    TEKKEN_PATTERN,
    drawn_text,
    drawn_tokens,
    qwen_like,
    refused,
    tekken,
    write_kimi,
    write_lines,
    write_model,
    write_tekken,
)

KIMI_NAMES = ["[BOS]", "[EOS]", "<|im_end|>", "<think>"]
TEKKEN_NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
TEXTS = examples(400)
BYTES = [bytes((byte,)) for byte in range(0x100)]
HELLO = [{"role": "user", "content": "hello"}]
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{rest}]{first}[\p{{Ll}}{rest}]{then}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for rest in [r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"]
            for first, then in [("*", "+"), ("+", "*")]
        ),
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Kind = Callable[[Path], str]


def shuffled(random: Random) -> list[bytes]:
    """Return tokens whose bytes are in an order of their own, as in OpenAI's vocabularies."""
    return [*random.sample(BYTES, 0x100), *drawn_tokens(random)[0x100:]]


@pytest.mark.parametrize("seed", range(examples(4, least=1)))
def test_kimis_ids_are_tiktokens(tmp_path: Path, seed: int) -> None:
    tiktoken, random = pytest.importorskip("tiktoken"), Random(seed)
    tokens = shuffled(random)
    specials = {f"<|reserved_token_{at}|>": at for at in range(len(tokens) + 4, len(tokens) + 256)}
    specials |= {name: at for at, name in enumerate(KIMI_NAMES, len(tokens))}
    ranks = {token: at for at, token in enumerate(tokens)}
    truth = tiktoken.Encoding("", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    text = load_text(write_kimi(tmp_path, tokens, KIMI_NAMES), "auto")
    for _ in range(TEXTS):
        drawn = drawn_text(random, [*specials][-8:])
        ids = truth.encode(drawn, allowed_special="all")
        assert text.encode(drawn) == ids, drawn
        assert text.decode(ids) == drawn.replace("[BOS]", "").replace("[EOS]", "")


@pytest.mark.parametrize("seed", range(examples(4, least=1)))
def test_qwens_ids_are_tiktokens_of_composed_text(tmp_path: Path, seed: int) -> None:
    tiktoken, random = pytest.importorskip("tiktoken"), Random(seed)
    tokens = shuffled(random)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{at}|>" for at in range(205))]
    ranks = {token: at for at, token in enumerate(tokens)}
    specials = {name: at for at, name in enumerate(names, len(tokens))}
    truth = tiktoken.Encoding("", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    write_lines(tmp_path / "qwen.tiktoken", tokens)
    text = load_text(str(tmp_path), "auto")
    for _ in range(TEXTS):
        drawn = drawn_text(random, names[:5])
        assert text.encode(drawn) == truth.encode(unicodedata.normalize("NFC", drawn), allowed_special="all"), drawn


@pytest.mark.parametrize("seed", range(examples(4, least=1)))
def test_tekkens_ids_are_tiktokens_behind_those_of_special_tokens(tmp_path: Path, seed: int) -> None:
    tiktoken, random = pytest.importorskip("tiktoken"), Random(seed)
    tokens = drawn_tokens(random)
    ranks = {token: at for at, token in enumerate(tokens)}
    truth = tiktoken.Encoding("", pat_str=TEKKEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
    text = load_text(write_tekken(tmp_path, tekken(tokens, TEKKEN_NAMES)), "auto")
    for _ in range(TEXTS):
        drawn = drawn_text(random)
        ids = [30 + rank for rank in truth.encode_ordinary(drawn)]
        assert text.encode(drawn) == [1, *ids], drawn
        assert text.encode(drawn, add_special_tokens=False) == ids
        assert text.decode([1, *ids]) == drawn


@pytest.mark.parametrize("kind", ["unnamed", "named", "real"])
def test_mistral_common_reads_the_same(tmp_path: Path, kind: str) -> None:
    reference, random = pytest.importorskip("mistral_common.tokens.tokenizers.tekken"), Random(7)
    if kind == "real":
        (tmp_path / "tekken.json").symlink_to(Path(reference.__file__).parents[2] / "data" / "tekken_240911.json")
    else:
        write_tekken(tmp_path, tekken(drawn_tokens(random), TEKKEN_NAMES if kind == "named" else None))
    text, truth = load_text(str(tmp_path)), reference.Tekkenizer.from_file(tmp_path / "tekken.json")
    assert text.special_ids == {truth.id_to_piece(at): at for at in range(truth.num_special_tokens)}
    assert (text.bos_id, list(text.eos_ids), text.vocab_size) == (truth.bos_id, [truth.eos_id], truth.n_words)
    for _ in range(TEXTS):
        drawn = drawn_text(random)
        assert text.encode(drawn) == truth.encode(drawn, bos=True, eos=False), drawn


def kimi(directory: Path) -> str:
    return write_kimi(directory, drawn_tokens(Random(1)), KIMI_NAMES)


def qwen(directory: Path) -> str:
    write_lines(directory / "qwen.tiktoken", drawn_tokens(Random(1)))
    return str(directory)


def mistral(directory: Path) -> str:
    return write_tekken(directory, tekken(drawn_tokens(Random(1)), TEKKEN_NAMES))


@pytest.mark.parametrize("kind", [kimi, qwen, mistral])
def test_the_fast_encoder_reads_them(tmp_path: Path, kind: Kind) -> None:
    text = load_text(kind(tmp_path), "auto")
    assert isinstance(text, TokenizerText)
    assert (text.encoder.name, text.encoder.reason) == ("fast", "equal in the self-check")


@pytest.mark.parametrize("kind", [kimi, qwen, mistral])
def test_text_may_be_cut_before_the_special_tokens_of_the_template(tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    text = load_text(kind(tmp_path))
    assert isinstance(text, TokenizerText)
    chat = text.render_chat(HELLO)
    begin, end = text.mark_spans(chat)
    assert chat[begin[1] : end[0]] == "hello"
    assert chat_ids(text, HELLO) == [text.bos_id, *text.encode("hello", add_special_tokens=False), *text.eos_ids]


@pytest.mark.parametrize("kind", [kimi, qwen, mistral])
def test_without_a_template_text_is_encoded_and_chats_are_not(tmp_path: Path, kind: Kind) -> None:
    text = load_text(kind(tmp_path))
    assert text.decode(text.encode("hello")) == "hello"
    with pytest.raises(TextError, match="a model with a chat template"):
        chat_ids(text, HELLO)


@pytest.mark.parametrize("kind", [kimi, qwen, mistral])
def test_a_tokenizer_json_beside_them_is_read_instead(tmp_path: Path, kind: Kind) -> None:
    converted = load_text(kind(tmp_path)).tokenizer_digest
    write_model(tmp_path, qwen_like(), "")
    assert load_text(str(tmp_path)).encode("hello") == qwen_like().encode("hello").ids
    assert load_text(str(tmp_path)).tokenizer_digest != converted


def test_digests_differ_with_the_vocabulary_and_the_added_tokens(tmp_path: Path) -> None:
    tokens = drawn_tokens(Random(1))
    first = load_text(write_kimi(tmp_path, tokens)).tokenizer_digest
    assert load_text(write_kimi(tmp_path, tokens)).tokenizer_digest == first
    assert load_text(write_kimi(tmp_path, tokens[:-1])).tokenizer_digest != first
    assert load_text(write_kimi(tmp_path, tokens, ["[BOS]", "[END]"])).tokenizer_digest != first


def test_reserved_tokens_and_those_that_are_not_special_are_text(tmp_path: Path) -> None:
    text = load_text(write_kimi(tmp_path, drawn_tokens(Random(1)), KIMI_NAMES))
    first = 600
    assert text.special_ids == {"[BOS]": first, "[EOS]": first + 1}
    assert text.encode("<think><|reserved_token_855|>") == [first + 3, first + 255]
    assert text.decode([first, first + 3, first + 255]) == "<think><|reserved_token_855|>"
    assert text.vocab_size == first + 256


LINES = [
    (b"IQ== 0\nIg== 2\n", "line 2", 2, "1: ranks from 0 on, in order"),
    (b"IQ== 0\nIg==\n", "line 2", b"Ig==", "a token in base64, a space, its rank"),
    (b"IQ== 0\n!!!! 1\n", "line 2", b"!!!! 1", "a token in base64, a space, its rank"),
    (b"IQ== 0\n", "", "no token for the byte 0", "a token for each byte"),
    (b"", "", "no token for the byte 0", "a token for each byte"),
]


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
@pytest.mark.parametrize(("content", "where", "found", "allowed"), LINES)
def test_a_broken_line_is_named(
    tmp_path: Path, name: str, content: bytes, where: str, found: object, allowed: str
) -> None:
    write_kimi(tmp_path, BYTES)
    (tmp_path / "tiktoken.model").unlink()
    (tmp_path / name).write_bytes(content)
    error = refused(lambda: load_text(str(tmp_path)))
    assert error.field == f"{tmp_path / name}: {where}".removesuffix(": ")
    assert (error.found, error.allowed) == (found, allowed)


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"config": {}}, "Object missing required field `pattern` - at `$.config`"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "Invalid base64 encoded string - at `$.vocab[0].token_bytes`"),
        ({"vocab": [{"rank": "0", "token_bytes": ""}]}, "Expected `int`, got `str` - at `$.vocab[0].rank`"),
        ({"special_tokens": [{"rank": 0}]}, "Object missing required field `token_str` - at `$.special_tokens[0]`"),
    ],
)
def test_a_broken_tekken_file_is_named_with_the_place(tmp_path: Path, changed: dict[str, Any], where: str) -> None:
    write_tekken(tmp_path, tekken(BYTES) | changed)
    error = refused(lambda: load_text(str(tmp_path)))
    assert (error.field, error.found) == (str(tmp_path / "tekken.json"), where)


@pytest.mark.parametrize(
    ("size", "special", "field", "found", "allowed"),
    [
        (30, 30, "default_vocab_size", 30, "31 to 287"),
        (288, 30, "default_vocab_size", 288, "31 to 287"),
        (275, 19, "default_num_special_tokens", 19, "20 or more"),
    ],
)
def test_a_tekken_file_of_an_impossible_size_is_refused(
    tmp_path: Path, size: int, special: int, field: str, found: int, allowed: str
) -> None:
    file = tekken(BYTES)
    file["config"] |= {"default_vocab_size": size, "default_num_special_tokens": special}
    write_tekken(tmp_path, file)
    error = refused(lambda: load_text(str(tmp_path)))
    assert (error.field, error.found, error.allowed) == (f"{tmp_path / 'tekken.json'}: config.{field}", found, allowed)


@pytest.mark.parametrize("key", ["vocab", "special_tokens"])
def test_tekken_ranks_out_of_order_are_named(tmp_path: Path, key: str) -> None:
    file = tekken(BYTES, TEKKEN_NAMES)
    file[key][3]["rank"] = 4
    write_tekken(tmp_path, file)
    error = refused(lambda: load_text(str(tmp_path)))
    assert (error.field, error.found) == (f"{tmp_path / 'tekken.json'}: {key}[3].rank", 4)


def test_a_pattern_that_is_none_is_the_files_fault(tmp_path: Path) -> None:
    file = tekken(BYTES)
    file["config"]["pattern"] = "("
    write_tekken(tmp_path, file)
    assert refused(lambda: load_text(str(tmp_path))).field == str(tmp_path / "tekken.json")


@pytest.mark.parametrize(
    ("names", "decoder", "file", "found"),
    [
        ((), {"255": {"content": "[BOS]"}}, "tokenizer_config.json: added_tokens_decoder", 255),
        ((), 7, "tokenizer_config.json", "Expected `object`, got `int` - at `$.added_tokens_decoder`"),
    ],
)
def test_added_tokens_that_may_not_be_are_named(
    tmp_path: Path, names: list[str], decoder: object, file: str, found: object
) -> None:
    write_kimi(tmp_path, BYTES, names, **({} if names else {"added_tokens_decoder": decoder}))
    error = refused(lambda: load_text(str(tmp_path)))
    assert (error.field, error.found) == (f"{tmp_path}/{file}", found)


def test_a_token_of_the_name_of_an_added_token_is_never_encoded(tmp_path: Path) -> None:
    text = load_text(write_kimi(tmp_path, [*BYTES, b"[B", b"OS]", b"[BOS]"], ["[BOS]"]))
    assert text.encode("[BOS][B") == [259, 256]


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tiktoken.model"])
def test_a_model_with_another_tokenizer_is_loaded_without_it(tmp_path: Path, name: str) -> None:
    write_kimi(tmp_path, BYTES, tokenizer_class="ChatGLM4Tokenizer")
    (tmp_path / "tiktoken.model").rename(tmp_path / name)
    assert refused(lambda: load_text(str(tmp_path))).field == str(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text("{}")
    text = load_text(str(tmp_path))
    calls: list[Callable[[], object]] = [
        lambda: text.encode("a"), lambda: chat_ids(text, HELLO), lambda: text.render_chat(HELLO),
        lambda: text.decode([1]), text.detokenizer, lambda: text.token_bytes(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TextError) as raised:
            call()
        assert (raised.value.field, raised.value.found) == ("tokenizer", str(tmp_path))
    assert text.tokenizer_digest == load_text(str(tmp_path)).tokenizer_digest != load_text("byte").tokenizer_digest


@pytest.mark.parametrize(
    ("name", "data"),
    [("<0xE2>", b"\xe2"), ("\u0120a", b" a"), ("\u00e2\u0124", b"\xe2\x82"), ("", b""), ("<0xe2>", b"<0xe2>")],
)
def test_bytes_are_spelt_in_hex_or_a_character_each(name: str, data: bytes) -> None:
    assert spelt_bytes(name) == data


@pytest.mark.parametrize("name", [" a", "\u2581a", "\u65e5"])
def test_other_names_spell_none(name: str) -> None:
    assert spelt_bytes(name) is None


def test_the_characters_are_those_of_the_library() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    spelt = [spelt_bytes(character) for character in alphabet]
    assert sorted(each for each in spelt if each is not None) == [bytes((byte,)) for byte in range(256)]
