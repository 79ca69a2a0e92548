"""The interface of a model's text: text to tokens and tokens to text, the same in router and agent.

Packed ids are little-endian u32s. Everything except detokenizers is immutable and thread-safe;
long texts should be encoded off the event loop.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from typing_extensions import Unpack

from kv_runtime.text.chat_messages import Message
from kv_runtime.text.chat_template import ChatOptions


class Detokenizer(Protocol):
    """Turns the tokens of one response into text as they come. The joined text equals `decode` of all tokens.

    This holds if the tokens' bytes are UTF-8; otherwise each broken character becomes one or more U+FFFD.
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
    """The ids of tokens without text, by name."""
    eos_ids: frozenset[int]
    bos_id: int | None = None
    """The token at the beginning of texts, if the model has one."""

    @abstractmethod
    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the packed tokens of a completion's prompt, by default with the model's special tokens around it.

        Raises:
            TextError: it names `prompt`: lone surrogates, or text at which the tokenizer fails.
        """

    @abstractmethod
    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the packed tokens of a chat.

        Raises:
            TextError: a message that is not allowed, a chat that the template refuses, or at which the tokenizer fails.
        """

    @abstractmethod
    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the chat as one string, for people to read; raise `TextError` as `pack_chat` does."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special and unknown ids have none, broken UTF-8 becomes U+FFFD."""

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        """Return a new detokenizer for one answer. Special tokens named in `shown` become their names."""
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
        return array("I", self.pack(text, add_special_tokens=add_special_tokens)).tolist()


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
