"""A model with a tokenizer of a kind that is not read here: its engines alone can tokenize its prompts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from typing_extensions import Unpack

from kv_runtime.text.chat_messages import TextError, digest_of
from kv_runtime.text.chat_template import ChatOptions, Message
from kv_runtime.text.model import Detokenizer, Text


class UnreadText(Text):
    """Raises `TextError` wherever text and tokens are turned into each other."""

    tokenizer_digest = template_digest = digest_of(b"unread")
    vocab_size = 0
    special_ids: Mapping[str, int] = {}
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def refuse(self) -> NoReturn:
        """Raise `TextError`."""
        allowed = "a directory with tokenizer.json, tekken.json, qwen.tiktoken, or Kimi's tiktoken.model"
        raise TextError("tokenizer", self.directory, allowed)

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:  # noqa: ARG002
        """Raise `TextError`."""
        self.refuse()

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:  # noqa: ARG002
        """Raise `TextError`."""
        self.refuse()

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:  # noqa: ARG002
        """Raise `TextError`."""
        self.refuse()

    def decode(self, ids: Iterable[int]) -> str:  # noqa: ARG002
        """Raise `TextError`."""
        self.refuse()

    def _detokenizer(self) -> Detokenizer:
        self.refuse()

    def token_bytes(self, token_id: int) -> bytes | None:  # noqa: ARG002
        """Raise `TextError`."""
        self.refuse()
