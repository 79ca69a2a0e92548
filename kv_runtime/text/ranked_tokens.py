"""Converts vocabularies that rank their tokens, tiktoken's and Mistral's tekken, to a `tokenizer.json`.

    tekken.json       pattern, vocabulary and special tokens, which have the first ids (Mistral)
    tiktoken.model    in each line a token in base64 and its rank (Kimi, Moonlight); special tokens come after them:
                      those that `tokenizer_config.json` names, and reserved ones
    qwen.tiktoken     lines as in `tiktoken.model` (Qwen 1); the special tokens are fixed

These vocabularies merge the two adjacent parts of a word that together are the token of the lowest rank. `tokenizers`
ranks pairs of parts instead. Listing all pairs that are a token, in the order of the tokens' ranks, merges the same
parts. The order of one token's pairs has no effect: wherever two parts that form the token stand side by side, they are
the same two, since only merges within the token's own text made them. Tokens that no merges make are found as whole
words (`ignore_merges`).

Sources: openai/tiktoken, `src/lib.rs` (`byte_pair_merge`); mistralai/mistral-common,
`src/mistral_common/tokens/tokenizers/tekken.py` (`Tekkenizer`); in the models' repositories
moonshotai/Kimi-K2-Instruct, `tokenization_kimi.py`, and moonshotai/Moonlight-16B-A3B, `tokenization_moonshot.py`
(`TikTokenTokenizer`); Qwen/Qwen-7B, `tokenization_qwen.py` (`QWenTokenizer`).

Tokens that are not complete characters have their bytes in their names:

    <0xE2>         the byte: vocabularies with byte fallback
    âĢ             a character for each byte: byte-level vocabularies. Printable Latin-1 stands for itself; the other
                   bytes, in order, are the characters from U+0100 on

Source: the `tokenizers` library, `ByteFallback` and `ByteLevel`; GPT-2's `bytes_to_unicode`.
"""

import json
import re
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.chat_template import file_content

_T = TypeVar("_T")
_SPECIAL_MAX = 1 << 16
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_KIMI_CLASS = "TikTokenTokenizer"
_KIMI_RESERVED = 256
_KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{at}|>" for at in range(205)))
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of a `tekken.json` that names none."""


class TokenizerFile(NamedTuple):
    """A `tokenizer.json`, the file that it is made from, and the variables of templates for its special tokens."""

    path: Path
    content: bytes
    special_tokens: Mapping[str, str]


class _Added(msgspec.Struct, gc=False):
    """An added token, as `tokenizer_config.json` and `tokenizer.json` have it."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Ranked(NamedTuple):
    """A vocabulary: tokens by rank, which have the ids from `first_id` on; added tokens by id."""

    pattern: str
    tokens: list[bytes]
    added: Mapping[int, _Added]
    first_id: int = 0
    normalizer: str = ""
    special_tokens: Mapping[str, str] = {}
    begin: str = ""
    """The token before a prompt; empty: none."""


class _TekkenToken(msgspec.Struct, gc=False):
    rank: int
    token_bytes: bytes


class _TekkenSpecial(msgspec.Struct, gc=False):
    rank: int
    token_str: str


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: Annotated[int, msgspec.Meta(ge=0, le=_SPECIAL_MAX)]


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecial] | None = None


class _TokenizerConfig(msgspec.Struct):
    tokenizer_class: str = ""
    added_tokens_decoder: dict[int, _Added] = {}


def ranked_tokens(directory: Path) -> TokenizerFile | None:
    """Return the directory's tokenizer; None: it has no file of `_READERS`, or the pattern is unknown.

    Raises:
        TextError: names the file that cannot be read, or is broken.
    """
    for name, read in _READERS.items():
        if (path := directory / name).exists() and (ranked := read(path)):
            return TokenizerFile(path, _tokenizer_json(path, ranked), ranked.special_tokens)
    return None


def _read_tekken(path: Path) -> _Ranked:
    tekken = _decoded(path, _Tekken)
    count = tekken.config.default_num_special_tokens
    size = tekken.config.default_vocab_size - count
    if not 0 < size <= len(tekken.vocab):
        allowed = f"{count + 1} to {count + len(tekken.vocab)}"
        raise TextError(f"{path}: config.default_vocab_size", size + count, allowed)
    for at, token in enumerate(tekken.vocab[:size]):
        _check_rank(f"{path}: vocab[{at}].rank", token.rank, at)
    given = tekken.special_tokens
    specials = list(_TEKKEN_SPECIAL) if given is None else [token.token_str for token in given]
    for at, special in enumerate(given or ()):
        _check_rank(f"{path}: special_tokens[{at}].rank", special.rank, at)
    specials += [f"<SPECIAL_{at}>" for at in range(len(specials), count)]
    if len(specials) > count:
        raise TextError(f"{path}: config.default_num_special_tokens", count, f"{len(specials)} or more")
    return _Ranked(
        tekken.config.pattern,
        [token.token_bytes for token in tekken.vocab[:size]],
        {at: _Added(name, special=True) for at, name in enumerate(specials)},
        first_id=count,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        begin="<s>" if "<s>" in specials else "",
    )


def _read_kimi(path: Path) -> _Ranked | None:
    at = path.with_name("tokenizer_config.json")
    config = _decoded(at, _TokenizerConfig)
    if config.tokenizer_class != _KIMI_CLASS:
        return None
    tokens = _read_lines(path)
    reserved = range(len(tokens), len(tokens) + _KIMI_RESERVED)
    for token_id in config.added_tokens_decoder:
        if token_id < len(tokens):
            raise TextError(f"{at}: added_tokens_decoder", token_id, f"ids from {len(tokens)} on, behind {path.name}")
    added = {token_id: _Added(f"<|reserved_token_{token_id}|>") for token_id in reserved}
    return _Ranked(_KIMI_PATTERN, tokens, added | config.added_tokens_decoder)


def _read_qwen(path: Path) -> _Ranked:
    tokens = _read_lines(path)
    added = {token_id: _Added(name, special=True) for token_id, name in enumerate(_QWEN_SPECIAL, len(tokens))}
    specials = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return _Ranked(_QWEN_PATTERN, tokens, added, normalizer="NFC", special_tokens=specials)


_READERS: Mapping[str, Callable[[Path], _Ranked | None]] = {
    "tekken.json": _read_tekken,
    "tiktoken.model": _read_kimi,
    "qwen.tiktoken": _read_qwen,
}


def _read_lines(path: Path) -> list[bytes]:
    tokens = []
    for at, line in enumerate(file_content(path).splitlines()):
        token, _, rank = line.partition(b" ")
        try:
            tokens.append(b64decode(token, validate=True))
            found = int(rank)
        except ValueError as error:
            raise TextError(f"{path}: line {at + 1}", line, "a token in base64, a space, its rank") from error
        _check_rank(f"{path}: line {at + 1}", found, at)
    return tokens


def _check_rank(field: str, rank: int, at: int) -> None:
    if rank != at:
        raise TextError(field, rank, f"{at}: ranks from 0 on, in order")


def _decoded(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(file_content(path), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TextError(str(path), str(error), "JSON of a tokenizer") from error


def _tokenizer_json(path: Path, ranked: _Ranked) -> bytes:
    known = set(ranked.tokens)
    if missing := [byte for byte in range(0x100) if bytes((byte,)) not in known]:
        raise TextError(str(path), f"no token for the byte {missing[0]}", "a token for each byte")
    vocab = {spelt(token): rank for rank, token in enumerate(ranked.tokens, ranked.first_id)}
    # No text is encoded as a ranked token with an added token's name: the added token is extracted before.
    vocab |= {added.content: token_id for token_id, added in ranked.added.items()}
    merges = [
        (spelt(token[:at]), spelt(token[at:]))
        for token in ranked.tokens
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": ranked.pattern}, "behavior": "Isolated", "invert": False}
    written = {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "normalized": False, **msgspec.to_builtins(token)}
            for token_id, token in sorted(ranked.added.items())
        ],
        "normalizer": {"type": ranked.normalizer} if ranked.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": _begins_with(ranked.begin, vocab[ranked.begin]) if ranked.begin else None,
        "decoder": byte_level,
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocab, "merges": merges},
    }
    return json.dumps(written).encode()


def _begins_with(token: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor that puts a token before a prompt."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def spelt_bytes(name: str) -> bytes | None:
    """Return the bytes of a token by its name; None if the name is of neither kind."""
    if spelt := _FALLBACK.fullmatch(name):
        return bytes.fromhex(spelt[1])
    try:
        return bytes(_BYTES[character] for character in name)
    except KeyError:
        return None


def spelt(token: bytes) -> str:
    """Return the name of a token of a byte-level vocabulary."""
    return token.decode("latin-1").translate(_CHARACTERS)


def _bytes_of_characters() -> dict[str, int]:
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _bytes_of_characters()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}
