"""A model with a tokenizer of a kind that is not read here: its engines alone can tokenize its prompts."""

from collections.abc import Mapping
from typing import NoReturn

from kv_runtime.text.chat_messages import TextError, digest_of
from kv_runtime.text.model import Text


class UnreadText(Text):
    """Raises `TextError` wherever text and tokens are turned into each other."""

    tokenizer_digest = template_digest = digest_of(b"unread")
    vocab_size = 0
    special_ids: Mapping[str, int] = {}
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise `TextError`."""
        allowed = "a directory with tokenizer.json, tekken.json, qwen.tiktoken, or Kimi's tiktoken.model"
        raise TextError("tokenizer", self.directory, allowed)

    pack = pack_chat = render_chat = decode = token_bytes = _detokenizer = refuse
