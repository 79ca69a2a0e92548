"""Which encoder a model gets: the fast one where it is equal, else the library `tokenizers`."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens  # type: ignore[import-untyped]  # it ships no types
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.encoders import (
    IDS_MAX,
    TEXTS,
    Encoder,
    check_texts,
    choose_encoder,
)
from kv_runtime.text.loading import load_text
from kv_runtime.text.tokenizer_model import TokenizerText
from tests.unit.kv_runtime.model_files import LLAMA_MARKS, LLAMA_TEMPLATE, llama_like, qwen_like, write_model

KINDS = [llama_like, qwen_like]


def saved(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


def packed(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_encoders_are_equal_gets_the_fast_one(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    encoder = choose_encoder(tokenizer, saved(tokenizer))
    assert (encoder.name, encoder.reason, encoder.failures) == ("fast", "equal in the self-check", 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", ["hf", "fast"])
@pytest.mark.parametrize("specials", [True, False])
def test_either_encoder_gives_the_ids_of_tokenizers(kind: Callable[[], Tokenizer], wanted: Any, specials: bool) -> None:
    tokenizer = kind()
    encoder = choose_encoder(tokenizer, saved(tokenizer), wanted)
    for text in TEXTS:
        expected = packed(tokenizer.encode(text, add_special_tokens=specials).ids)
        assert encoder.pack(text, add_special_tokens=specials) == expected


def test_the_check_has_every_added_token() -> None:
    texts = "".join(check_texts([*LLAMA_MARKS, "<extra>"]))
    assert all(texts.count(mark) >= 6 for mark in [*LLAMA_MARKS, "<extra>"])


def other_vocabulary() -> bytes:
    """Return a model that says it is the same, and merges otherwise."""
    content = json.loads(llama_like().to_str())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    content["model"]["ignore_merges"] = False
    return json.dumps(content).encode()


def test_a_model_whose_encoders_differ_gets_tokenizers_and_the_reason() -> None:
    encoder = choose_encoder(llama_like(), other_vocabulary())
    assert encoder.name == "hf"
    assert encoder.reason.startswith("it encodes ")


def test_a_model_that_the_fast_one_does_not_read_gets_tokenizers_and_the_reason() -> None:
    encoder = choose_encoder(llama_like(), b'{"version": "1.0"}')
    assert encoder.name == "hf"
    assert encoder.reason.startswith("fastokens cannot read the tokenizer: ")


def test_a_model_with_an_id_beyond_the_fast_ones_memory_gets_tokenizers_and_the_reason() -> None:
    content = json.loads(llama_like().to_str())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 4_294_967_290, "content": "<far>"})
    reason = choose_encoder(llama_like(), json.dumps(content).encode()).reason
    assert reason == f"fastokens cannot read the tokenizer: the added token 4294967290 is beyond {IDS_MAX}"


def test_a_fast_encoder_that_is_wanted_and_not_equal_is_refused() -> None:
    with pytest.raises(TextError, match=r"tokens\.encoder: .* it encodes") as refused:
        choose_encoder(llama_like(), other_vocabulary(), "fast")
    assert refused.value.field == "tokens.encoder"


def test_tokenizers_that_are_wanted_are_not_compared() -> None:
    assert choose_encoder(llama_like(), b"not looked at", "hf").reason == "configured"


class Failing:
    """A library that runs into its limits."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool = False) -> tuple[bytes, bytes]:
        raise RuntimeError(inputs, add_special_tokens)


def panicking() -> Tokenizer:
    """Return a model that panics at the text of `PANIC`, and at ids whose names are shorter than it strips."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a|aa)+b"), "isolated")
    tokenizer.decoder = decoders.Strip("a", 2, 5)
    return tokenizer


PANIC = "a" * 100


@pytest.mark.parametrize("wanted", ["auto", "fast"])
def test_a_fast_encoder_that_raises_in_the_self_check_fails_it(monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    library = fastokens.Tokenizer

    class FailingAtEmoji:
        """fastokens, which raises for some texts."""

        def __init__(self, content: str) -> None:
            self._fast = library.from_json_str(content)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._fast, name)

        def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool = False) -> Any:
            if "😀" in inputs[0]:
                raise RuntimeError("an emoji")
            return self._fast.encode_batch_flat(inputs, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=FailingAtEmoji))
    tokenizer, why = llama_like(), "the self-check fails: an emoji"
    if wanted == "auto":
        encoder = choose_encoder(tokenizer, saved(tokenizer), wanted)
        assert (encoder.name, encoder.reason) == ("hf", why)
    else:
        with pytest.raises(TextError, match=why):
            choose_encoder(tokenizer, saved(tokenizer), wanted)


class Panicking:
    """A fast library that panics."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool = False) -> tuple[bytes, bytes]:
        encoding = panicking().encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
        raise AssertionError(encoding)


@pytest.mark.parametrize("library", [Failing(), Panicking()], ids=["fails", "panics"])
def test_a_text_at_which_the_fast_one_fails_or_panics_gets_the_ids_of_tokenizers_and_is_counted(
    library: Failing | Panicking,
) -> None:
    tokenizer = llama_like()
    encoder = Encoder(tokenizer, "", library)
    expected = packed(tokenizer.encode(PANIC, add_special_tokens=False).ids)
    assert (encoder.pack(PANIC, add_special_tokens=False), encoder.failures) == (expected, 1)


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda text: text.pack(PANIC), "prompt"),
        (lambda text: text.pack_chat([{"role": "user", "content": PANIC}]), "messages"),
        (lambda text: text.decode([0]), "tokens"),
        (lambda text: text.detokenizer().push([0]), "tokens"),
        (lambda text: text.token_bytes(0), "tokens"),
    ],
    ids=["a prompt", "a chat", "ids", "an answer", "a token"],
)
def test_what_a_tokenizer_panics_at_is_refused_by_name(
    tmp_path: Path, act: Callable[[Any], object], field: str
) -> None:
    text = load_text(write_model(tmp_path, panicking(), "{{ messages[0].content }}"))
    with pytest.raises(TextError) as refused:
        act(text)
    assert refused.value.field == field
    assert text.pack("ab") == packed([0, 1])


def test_a_tokenizer_that_panics_while_it_is_read_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path, llama_like(), LLAMA_TEMPLATE)
    path = tmp_path / "tokenizer.json"
    broken = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with pytest.raises(TextError, match="charsmap") as refused:
        load_text(model)
    assert refused.value.field == str(path)


def test_a_model_that_panics_in_the_self_check_gets_tokenizers_and_the_reason() -> None:
    tokenizer = panicking()
    tokenizer.add_special_tokens([AddedToken(PANIC[:50], normalized=False, single_word=True)])
    content = json.loads(tokenizer.to_str()) | {"decoder": None}
    encoder = choose_encoder(tokenizer, json.dumps(content).encode())
    assert encoder.reason.startswith("the self-check fails: ")


def words_by_spaces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def metaspaced() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<unk>": 3}, [("▁", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("kind", [words_by_spaces, metaspaced])
def test_whatever_a_model_is_its_ids_are_those_of_tokenizers(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    encoder = choose_encoder(tokenizer, saved(tokenizer))
    for text in ("a b a", "<s>a", "", "ä"):
        assert encoder.pack(text, add_special_tokens=True) == packed(tokenizer.encode(text).ids)


def test_a_models_text_says_which_encoder_it_has(tmp_path: Path) -> None:
    model = write_model(tmp_path, llama_like(), LLAMA_TEMPLATE)
    for wanted, name in (("auto", "fast"), ("hf", "hf"), ("fast", "fast")):
        text = load_text(model, wanted)  # type: ignore[arg-type]  # each of them is one
        assert isinstance(text, TokenizerText)
        assert text.encoder.name == name
