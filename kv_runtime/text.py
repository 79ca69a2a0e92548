"""Text becomes tokens and tokens become text, the same in router and agent, and never over the network.

A chat is a list of pieces. A piece begins with a token that only the template can write, and ends before the next one,
so that

    encode_chat(chat) = encode_piece(p) for every piece p of chat_pieces(chat), one after the other,

and a piece that was encoded before need not be encoded again. There are two kinds of model:

    "byte"       built in, for simulated workers and tests. Ids 0..255 are UTF-8 bytes, the ids above are the template's
                 own, which no text of a user can write. Message by message:

                     [<|tools|> json <|end|>]  { <|role|> content [<|calls|> json] <|end|> }  [<|assistant|>]

                 so the tokens of messages[:k] begin those of messages; and a prompt, with the UTF-8 that was
                 answered to it, begins the prompt of the next turn.
    a directory  `tokenizer.json` and `tokenizer_config.json`, the template in the latter or in `chat_template.jinja`.
                 Exactly what the engine itself would encode: a special token in a user's text is that token there too.

Everything but a detokenizer is immutable and may be used by several threads at once; long texts belong off the event
loop.
"""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

from kv_runtime.chat_template import (
    ChatTemplate,
    Message,
    TextError,
    Tool,
    checked_messages,
    checked_unicode,
    digest_of,
    file_content,
    read_template,
)

__all__ = ["ByteText", "Detokenizer", "Message", "Piece", "Text", "TextError", "TokenizerText", "Tool", "load_text"]

BYTE_MODEL = "byte"
_BYTE_IDS = 256
_ROLE_TOKENS = {
    "system": "<|system|>",
    "developer": "<|system|>",  # OpenAI's newer word for it
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|tool|>",
}
_END, _TOOLS, _CALLS = "<|end|>", "<|tools|>", "<|calls|>"
_BYTE_SPECIALS = (*dict.fromkeys(_ROLE_TOKENS.values()), _END, _TOOLS, _CALLS)

_REPLACEMENT = "\ufffd"
_HELD_TOKENS_MAX = 8
"""A character is at most four bytes, so at most four tokens: what stays broken for longer is none."""


class Piece(NamedTuple):
    """A part of a chat that is encoded by itself: the token it begins with ("" for none), and the text after it."""

    special: str
    text: str


class Detokenizer(Protocol):
    """Turns one answer's tokens into text as they come. What it returned, joined, is `decode` of all of them.

    That holds for tokens whose text is UTF-8. Of other tokens every broken character becomes one or more U+FFFD.
    """

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete; a character whose bytes are not all there is kept back."""

    def flush(self) -> str:
        """Return what was kept back; the answer is over."""


class Text(ABC):
    """A model's tokenizer and chat template."""

    tokenizer_digest: str
    template_digest: str
    vocab_size: int
    """Every id is below it."""
    special_ids: Mapping[str, int]
    """Tokens that stand for no text."""
    eos_ids: frozenset[int]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a completion's prompt, with those that the model wants around it.

        Raises:
            TextError: lone surrogates.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special and unknown ids have none, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def chat_pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[Piece]:
        """Return the chat as pieces; with `add_generation_prompt` it ends where the assistant's answer begins.

        Raises:
            TextError: a message that is not allowed, or a chat that the template refuses.
        """

    @abstractmethod
    def encode_piece(self, piece: Piece) -> list[int]:
        """Return the tokens of one piece of `chat_pieces`, which do not depend on its neighbours."""

    @abstractmethod
    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one answer."""

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return the tokens of the chat; raise `TextError` as `chat_pieces` does."""
        pieces = self.chat_pieces(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return [token for piece in pieces for token in self.encode_piece(piece)]

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> str:
        """Return the chat as one string, for people to read: it cannot say which of its tokens a user wrote."""
        pieces = self.chat_pieces(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return "".join(piece.special + piece.text for piece in pieces)


def load_text(model_path: str) -> Text:
    """Return the model's text: "byte", or a local directory; raise `TextError` for anything else, or broken files."""
    if model_path == BYTE_MODEL:
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
    return TokenizerText(tokenizer, digest_of(content), read_template(directory))


class ByteText(Text):
    """The built-in model: a token per UTF-8 byte, and one per mark of the template."""

    tokenizer_digest = digest_of(repr((_BYTE_IDS, _BYTE_SPECIALS)).encode())
    template_digest = digest_of(repr((1, _BYTE_SPECIALS, _ROLE_TOKENS)).encode())
    vocab_size = _BYTE_IDS + len(_BYTE_SPECIALS)
    special_ids: Mapping[str, int] = {token: _BYTE_IDS + at for at, token in enumerate(_BYTE_SPECIALS)}
    eos_ids = frozenset({special_ids[_END]})

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text; there are no tokens around them."""
        return list(checked_unicode("text", text).encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of those ids that are bytes."""
        return _bytes_of(ids).decode(errors="replace")

    def chat_pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[Piece]:
        """Return the pieces that the module's first lines draw."""
        end = Piece(_END, "")
        pieces = [Piece(_TOOLS, _json("tools", tools)), end] if tools else []
        for index, message in enumerate(checked_messages(messages)):
            pieces.append(Piece(_ROLE_TOKENS[message["role"]], message["content"] or ""))
            if message.get("tool_calls"):
                pieces.append(Piece(_CALLS, _json(f"messages[{index}].tool_calls", message["tool_calls"])))
            pieces.append(end)
        return [*pieces, Piece(_ROLE_TOKENS["assistant"], "")] if add_generation_prompt else pieces

    def encode_piece(self, piece: Piece) -> list[int]:
        """Return the mark's id and the text's bytes, whatever they spell."""
        return [self.special_ids[piece.special], *piece.text.encode()]

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one answer."""
        return _ByteDetokenizer()


class TokenizerText(Text):
    """A model of a directory: a `tokenizers` tokenizer and a Jinja2 template."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_digest: str, template: ChatTemplate) -> None:
        tokenizer.no_truncation()  # a file may ask for either; a prompt is neither cut nor filled up
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._template = template
        self._cut = _cut_pattern([token.content for token in added.values() if not token.normalized])
        self._cut_tokens = {t.content for t in added.values() if not (t.normalized or t.lstrip or t.single_word)}
        self.tokenizer_digest = tokenizer_digest
        self.template_digest = template.digest
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        eos_id = tokenizer.token_to_id(template.special_tokens.get("eos_token", ""))
        self.eos_ids = frozenset() if eos_id is None else frozenset({eos_id})

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the text, with what the tokenizer's post-processor puts around them."""
        return self._tokenizer.encode(checked_unicode("text", text)).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat_pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[Piece]:
        """Return the rendered chat, cut before every token that the tokenizer takes out before it looks at the rest."""
        rendered = self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        cuts = [match for match in self._cut.finditer(rendered) if match[0] in self._cut_tokens]
        starts = [match.start() for match in cuts] + [len(rendered)]
        pieces = [Piece("", rendered[: starts[0]])] if starts[0] else []
        return pieces + [
            Piece(match[0], rendered[match.end() : end]) for match, end in zip(cuts, starts[1:], strict=True)
        ]

    def encode_piece(self, piece: Piece) -> list[int]:
        """Return the piece's tokens; the template has already written what the model wants around a chat."""
        return self._tokenizer.encode(piece.special + piece.text, add_special_tokens=False).ids

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one answer."""
        return _PrefixDetokenizer(self._tokenizer, frozenset(self.special_ids.values()))


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(_bytes_of(ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PrefixDetokenizer:
    """Decodes a window of tokens; what is longer than the text it had told is new.

    The window begins one text before the new tokens, since decoders treat the first token differently (they strip its
    space). Text that ends in U+FFFD may be half a character, and waits. (The library's own DecodeStream raises on
    tokens that are not UTF-8, which a model may produce, and cannot say what it kept back.)
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._told: list[int] = []
        self._told_characters = 0
        self._new: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(token) for token in ids if token not in self._special_ids)

    def _push_one(self, token: int) -> str:
        self._new.append(token)
        text = self._new_text()
        if not text or (text.endswith(_REPLACEMENT) and len(self._new) < _HELD_TOKENS_MAX):
            return ""
        self._told, self._new = self._new, []
        self._told_characters = len(self._tokenizer.decode(self._told))
        return text

    def flush(self) -> str:
        text = self._new_text() if self._new else ""
        self._told, self._told_characters, self._new = [], 0, []
        return text

    def _new_text(self) -> str:
        return self._tokenizer.decode(self._told + self._new)[self._told_characters :]


def _bytes_of(ids: Iterable[int]) -> bytes:
    return bytes(token for token in ids if token < _BYTE_IDS)


def _json(field: str, value: object) -> str:
    return checked_unicode(field, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _cut_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches where the tokenizer does: leftmost, then longest. Of no tokens, nowhere."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first) or r"(?!)")
