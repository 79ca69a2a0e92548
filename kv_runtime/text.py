"""Text becomes tokens and tokens become text, the same in router and agent, and never over the network.

There are two kinds of model:

    "byte"       built in, for simulated workers and tests. Ids 0..255 are UTF-8 bytes; the ids above belong to the
                 template, and a user's text cannot produce them. Message by message:

                     [<|tools|> json <|end|>]  { <|role|> content [<|calls|> json] <|end|> }  [<|assistant|>]

                 so the tokens of messages[:k] are a prefix of those of messages; a prompt and the UTF-8 of its
                 answer are a prefix of the next turn's prompt. Documents and template variables are ignored.
    a directory  `tokenizer.json` and `tokenizer_config.json`, the template in the latter or in `chat_template.jinja`.
                 Encodes exactly as the engine does: a special token in a user's text becomes that token.

Text of a directory's model may be cut before a mark: an added token that the tokenizer extracts before it encodes the
rest, whatever surrounds it (`marks.py`). Text before a mark need not be encoded again:

    pack_marked(text) = pack_marked(text[:at]) + pack_marked(text[at:])     for every `at` of mark_spans(text)

Packed ids are little-endian u32s. Everything except detokenizers is immutable and thread-safe;
long texts should be encoded off the event loop.
"""

import codecs
import json
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from typing_extensions import Unpack

from kv_runtime.chat_messages import blame_characters, checked_messages, checked_unicode, digest_of
from kv_runtime.chat_template import ChatOptions, ChatTemplate, Message, TextError, Tool, file_content, read_template
from kv_runtime.encoders import CONFIGURED, Encoder, HfEncoder, Wanted, choose_encoder
from kv_runtime.marks import mark_pattern
from kv_runtime.token_names import spelt_bytes

__all__ = [
    "ByteText",
    "ChatOptions",
    "Detokenizer",
    "Message",
    "Text",
    "TextError",
    "TokenizerText",
    "Tool",
    "load_text",
]

BYTE_MODEL = "byte"
_BYTE_IDS = 256
_ROLE_TOKENS = {
    "system": "<|system|>",
    "developer": "<|system|>",  # OpenAI's newer name
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|tool|>",
}
_END, _TOOLS, _CALLS = "<|end|>", "<|tools|>", "<|calls|>"
_BYTE_SPECIALS = (*dict.fromkeys(_ROLE_TOKENS.values()), _END, _TOOLS, _CALLS)

_REPLACEMENT = "\ufffd"
_HELD_TOKENS_MAX = 8
"""A character is at most four bytes, so at most four tokens; text that is broken for longer is invalid."""


class Detokenizer(Protocol):
    """Turns the tokens of one response into text as they come. The joined text equals `decode` of all tokens.

    That holds for tokens whose text is UTF-8. In other tokens every broken character becomes one or more U+FFFD.
    """

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete; an incomplete character is held back."""

    def flush(self) -> str:
        """Return the text that was held back; the response is over."""


class Text(ABC):
    """A model's tokenizer and chat template."""

    tokenizer_digest: str
    template_digest: str
    vocab_size: int
    """Every id is below it."""
    special_ids: Mapping[str, int]
    """Tokens without text."""
    eos_ids: frozenset[int]
    bos_id: int | None = None
    """The token at the beginning of texts, if the model has one."""

    @abstractmethod
    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the packed tokens of a completion's prompt, by default with the model's special tokens around it.

        Raises:
            TextError: lone surrogates.
        """

    @abstractmethod
    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the packed tokens of a chat.

        Raises:
            TextError: a message that is not allowed, or a chat that the template refuses.
        """

    @abstractmethod
    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the chat as one string, for people to read; raise `TextError` as `pack_chat` does."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special and unknown ids have none, broken UTF-8 becomes U+FFFD."""

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        """Return a new detokenizer for one answer. Special tokens named in `shown` are text there: their names."""
        names = {self.special_ids[name]: name for name in shown if name in self.special_ids}
        return _SpecialsShown(self._detokenizer(), names) if names else self._detokenizer()

    @abstractmethod
    def _detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one answer, which shows no special token."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """Return a token's bytes within a text, for a special token its name; None if unknown."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the result of `pack` as numbers."""
        return _unpacked(self.pack(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """Return the result of `pack_chat` as numbers."""
        return _unpacked(self.pack_chat(messages, **options))


def load_text(model_path: str, encoder: Wanted = "hf", *, chat_template: str = "") -> Text:
    """Return the model's text: "byte", or a local directory, whose `encoder` encodes.

    `chat_template` is a Jinja file that replaces the directory's own template; empty: no replacement.

    Raises:
        TextError: another path, broken files, or a fast encoder that is required and not equal.
    """
    if model_path == BYTE_MODEL:
        if chat_template:
            raise TextError("chat_template", chat_template, f"none: {BYTE_MODEL!r} has one of its own")
        return ByteText()
    directory = Path(model_path)
    if not model_path or not directory.is_dir():
        raise TextError("model", model_path, f"{BYTE_MODEL!r} or a local directory with tokenizer.json")
    path = directory / "tokenizer.json"
    content = file_content(path)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise TextError(str(path), str(error), "what the tokenizers library writes") from error
    tokenizer.no_truncation()  # a file may enable either; a prompt is neither truncated nor padded
    tokenizer.no_padding()
    chosen = choose_encoder(tokenizer, content, encoder)
    return TokenizerText(tokenizer, digest_of(content), read_template(directory, chat_template), chosen)


class ByteText(Text):
    """The built-in model: a token per UTF-8 byte, and one per mark of the template."""

    tokenizer_digest = digest_of(repr((_BYTE_IDS, _BYTE_SPECIALS)).encode())
    template_digest = digest_of(repr((2, _BYTE_SPECIALS, _ROLE_TOKENS)).encode())
    vocab_size = _BYTE_IDS + len(_BYTE_SPECIALS)
    special_ids: Mapping[str, int] = {token: _BYTE_IDS + at for at, token in enumerate(_BYTE_SPECIALS)}
    eos_ids = frozenset({special_ids[_END]})

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:  # noqa: ARG002 - there are none
        """Return the bytes of the text; there are no tokens around them."""
        return _packed_characters(checked_unicode("text", text).encode().decode("latin-1"))

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the pieces in the module's docstring: a mark's id, then the bytes of a text."""
        characters: list[str] = []
        for mark, text in _byte_pieces(messages, options):
            characters += chr(self.special_ids[mark]), text.encode().decode("latin-1")
        return _packed_characters("".join(characters))

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the pieces by name; marks in a user's text look the same."""
        return "".join(mark + text for mark, text in _byte_pieces(messages, options))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of those ids that are bytes."""
        return _bytes_of(ids).decode(errors="replace")

    def _detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the byte, or a mark's name."""
        if token_id < _BYTE_IDS:
            return bytes((token_id,))
        at = token_id - _BYTE_IDS
        return _BYTE_SPECIALS[at].encode() if at < len(_BYTE_SPECIALS) else None


class TokenizerText(Text):
    """A model of a directory: a `tokenizers` tokenizer and a Jinja2 template."""

    def __init__(
        self, tokenizer: Tokenizer, tokenizer_digest: str, template: ChatTemplate, encoder: Encoder | None = None
    ) -> None:
        """Decode with `tokenizer`, and encode with `encoder` (None: with the tokenizer)."""
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._template = template
        self._marks = mark_pattern(added.values(), (*template.sources.values(), *template.special_tokens.values()))
        self.encoder = encoder or HfEncoder(tokenizer, CONFIGURED)
        self.tokenizer_digest = tokenizer_digest
        self.template_digest = template.digest
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        eos_id = tokenizer.token_to_id(template.special_tokens.get("eos_token", ""))
        self.eos_ids = frozenset() if eos_id is None else frozenset({eos_id})
        self.bos_id = tokenizer.token_to_id(template.special_tokens.get("bos_token", ""))

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the tokens of the text, with what the tokenizer's post-processor puts around them."""
        return self.encoder.pack(checked_unicode("text", text), add_special_tokens=add_special_tokens)

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the rendered chat's tokens; the template has already written the special tokens."""
        return self.pack_marked(self._template.render(messages, **options))

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the chat as the model reads it."""
        return self._template.render(messages, **options)

    def render_utf8(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the chat as the model reads it, in UTF-8."""
        return self._template.render_utf8(messages, **options)

    def pack_marked(self, text: str) -> bytes:
        """Return the tokens of a rendered chat, or of a part of one that was cut before a mark."""
        return self.encoder.pack(text, add_special_tokens=False)

    def mark_spans(self, text: str) -> list[tuple[int, int]]:
        """Return begin and end of each mark in the text; the text may be cut before each."""
        return [match.span() for match in self._marks.finditer(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _detokenizer(self) -> Detokenizer:
        return _PrefixDetokenizer(self._tokenizer, frozenset(self.special_ids.values()))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the text that the token adds behind itself: decoders treat the first token of a text differently."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None or name in self.special_ids:
            return None if name is None else name.encode()
        once = self._tokenizer.decode([token_id])
        if _REPLACEMENT not in once:
            return self._tokenizer.decode([token_id, token_id])[len(once) :].encode()
        return spelt_bytes(name)


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(_bytes_of(ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _SpecialsShown:
    """Shows some special tokens by their names. Text after one is decoded like the beginning of a text."""

    def __init__(self, inner: Detokenizer, names: Mapping[int, str]) -> None:
        self._inner, self._names = inner, names

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(token) for token in ids)

    def flush(self) -> str:
        return self._inner.flush()

    def _push_one(self, token: int) -> str:
        name = self._names.get(token)
        return self._inner.push((token,)) if name is None else self._inner.flush() + name


class _PrefixDetokenizer:
    """Decodes a window of tokens; the text beyond that returned before is new.

    The window begins one text before the new tokens, since decoders treat the first token differently (they strip its
    space). Text that ends in U+FFFD may be half a character and is held back. (The library's own DecodeStream raises on
    tokens that are not UTF-8, which a model may produce, and does not return held-back text at the end.)
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._window: list[int] = []
        self._window_characters = 0
        self._new: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(token) for token in ids if token not in self._special_ids)

    def _push_one(self, token: int) -> str:
        self._new.append(token)
        text = self._new_text()
        if not text or (text.endswith(_REPLACEMENT) and len(self._new) < _HELD_TOKENS_MAX):
            return ""
        self._window, self._new = self._new, []
        self._window_characters = len(self._tokenizer.decode(self._window))
        return text

    def flush(self) -> str:
        text = self._new_text() if self._new else ""
        self._window, self._window_characters, self._new = [], 0, []
        return text

    def _new_text(self) -> str:
        return self._tokenizer.decode(self._window + self._new)[self._window_characters :]


def _bytes_of(ids: Iterable[int]) -> bytes:
    return bytes(token for token in ids if token < _BYTE_IDS)


def _json(field: str, value: object) -> str:
    return checked_unicode(field, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _byte_pieces(messages: Sequence[Message], options: ChatOptions) -> list[tuple[str, str]]:
    """Return pairs of a mark and the text after it."""
    checked = checked_messages(messages)
    blame_characters(checked)
    tools, continues = options.get("tools"), options.get("continue_final_message", False)
    pieces = [(_TOOLS, _json("tools", tools)), (_END, "")] if tools else []
    for index, message in enumerate(checked):
        pieces.append((_ROLE_TOKENS[message["role"]], message["content"] or ""))
        if message.get("tool_calls"):
            pieces.append((_CALLS, _json(f"messages[{index}].tool_calls", message["tool_calls"])))
        pieces.append((_END, ""))
    if options.get("add_generation_prompt", not continues):
        pieces.append((_ROLE_TOKENS["assistant"], ""))
    elif continues:
        pieces.pop()
    return pieces


def _packed_characters(characters: str) -> bytes:
    """Return the characters' numbers, packed."""
    return characters.encode("utf-32-le")


def _unpacked(ids: bytes) -> list[int]:
    unpacked = array("I", ids)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
