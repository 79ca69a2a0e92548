"""The text of a model's directory: tokenizer, `tokenizer_config.json` and the chat template.

`read_template` (`chat_template.py`) says where the template is. Text is encoded exactly as the engine does: a
special token in a user's text becomes that token.

Text may be cut before a mark: an added token that the tokenizer extracts before it encodes the rest, whatever surrounds
it (`encoders.py`). So a segment, the text from one mark to the next, is encoded once (`keep_segments`):

    pack_marked(text) = pack_marked(text[:at]) + pack_marked(text[at:])     for every `at` of mark_spans(text)
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from typing_extensions import Unpack

from kv_runtime.text.chat_messages import Message, checked_unicode
from kv_runtime.text.chat_template import ChatOptions, ChatTemplate
from kv_runtime.text.encoders import Encoder, mark_pattern, text_error
from kv_runtime.text.model import Detokenizer, Text
from kv_runtime.text.ranked_tokens import spelt_bytes

_REPLACEMENT = "\ufffd"
_HELD_TOKENS_MAX = 8
"""Broken text is held back for fewer tokens than this: a character is at most four bytes, so at most four tokens."""


class TokenizerText(Text):
    """A model of a directory: a `tokenizers` tokenizer and a Jinja2 template."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_digest: str, template: ChatTemplate, encoder: Encoder) -> None:
        """Decode with `tokenizer`, and encode with `encoder`."""
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._template = template
        self._marks = mark_pattern(added.values(), (*template.sources.values(), *template.special_tokens.values()))
        self.encoder = encoder
        self.tokenizer_digest = tokenizer_digest
        self.template_digest = template.digest
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        eos_id = tokenizer.token_to_id(template.special_tokens.get("eos_token", ""))
        self.eos_ids = frozenset() if eos_id is None else frozenset({eos_id})
        self.bos_id = tokenizer.token_to_id(template.special_tokens.get("bos_token", ""))

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the tokens of the text, with what the tokenizer's post-processor puts around them."""
        return self._packed("prompt", checked_unicode("prompt", text), add_special_tokens=add_special_tokens)

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the rendered chat's tokens; the template has already written the special tokens."""
        return self._packed("messages", self._template.render(messages, **options), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the chat as the model reads it."""
        return self._template.render(messages, **options)

    def pack_marked(self, text: str) -> bytes:
        """Return the tokens of a rendered chat, or of a part of one that was cut before a mark."""
        return self._packed("messages", text, add_special_tokens=False)

    def _packed(self, field: str, text: str, *, add_special_tokens: bool) -> bytes:
        try:
            return self.encoder.pack(text, add_special_tokens=add_special_tokens)
        except BaseException as error:  # noqa: BLE001 - a panic, or raised again
            raise text_error(error, field, "text that the model's tokenizer encodes") from None

    def mark_spans(self, text: str) -> list[tuple[int, int]]:
        """Return begin and end of each mark in the text; the text may be cut before each."""
        return [match.span() for match in self._marks.finditer(text)]

    def keep_segments(self, bytes_max: int) -> None:
        """From now on keep the ids of segments in about `bytes_max` bytes, and encode only those that are not kept."""
        self.encoder.keep_segments(self._marks, bytes_max)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return _decoded(self._tokenizer, list(ids))

    def _detokenizer(self) -> Detokenizer:
        return _PrefixDetokenizer(self._tokenizer, frozenset(self.special_ids.values()))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the token adds to a text, or a special token's name; None if the token is unknown."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None or name in self.special_ids:
            return None if name is None else name.encode()
        once = _decoded(self._tokenizer, [token_id])
        if _REPLACEMENT not in once:  # decoders treat the first token of a text differently: the second one counts
            return _decoded(self._tokenizer, [token_id, token_id])[len(once) :].encode()
        return spelt_bytes(name)


class _PrefixDetokenizer:
    """Decodes new tokens together with those of the text returned last, and returns the text that is added.

    The earlier tokens are decoded again since decoders strip the space of a text's first token. Text that ends in
    U+FFFD may be half a character and is held back. The library's own DecodeStream raises on tokens that are not UTF-8,
    which a model may produce, and does not return held-back text at the end.
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
        self._window_characters = len(_decoded(self._tokenizer, self._window))
        return text

    def flush(self) -> str:
        text = self._new_text() if self._new else ""
        self._window, self._window_characters, self._new = [], 0, []
        return text

    def _new_text(self) -> str:
        return _decoded(self._tokenizer, self._window + self._new)[self._window_characters :]


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    try:
        return tokenizer.decode(ids)
    except BaseException as error:  # noqa: BLE001 - a panic, or raised again
        raise text_error(error, "tokens", "ids that the model's tokenizer decodes") from None
