"""The tokenizer that an engine loads: a model directory's `tokenizer.json`, or one that takes bytes for tokens.

Source: `tensorrt_llm/llmapi/tokenizer.py`, class TransformersTokenizer: the members that an agent may read.
"""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

BYTES_FROM = 3  # 0 pads, 1 begins, 2 ends


class TokenizerBase(ABC):
    """What every tokenizer has."""

    eos_token_id: int
    bos_token_id: int
    pad_token_id: int | None
    vocab_size: int

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's tokens."""

    @abstractmethod
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Return the tokens' text."""


class ByteTokenizer(TokenizerBase):
    """UTF-8 bytes, from 3 on."""

    eos_token_id = 2
    bos_token_id = 1
    pad_token_id = 0
    vocab_size = BYTES_FROM + 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's bytes, after the beginning's token if asked for."""
        return [self.bos_token_id] * add_special_tokens + [BYTES_FROM + byte for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Return the text of all bytes; tokens that are no bytes have none."""
        del skip_special_tokens, kwargs
        return bytes(each - BYTES_FROM for each in token_ids if 0 <= each - BYTES_FROM < 256).decode(errors="replace")


class TransformersTokenizer(TokenizerBase):
    """A model directory's tokenizer, by the library that reads its `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415  only models that have one need it

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = _json(directory / "tokenizer_config.json")
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.eos_token_id = self._id(config.get("eos_token"), 2)
        self.bos_token_id = self._id(config.get("bos_token"), self.eos_token_id)
        self.pad_token_id = self._id(config["pad_token"], 0) if config.get("pad_token") else None

    def _id(self, token: str | dict[str, Any] | None, default: int) -> int:
        text = token["content"] if isinstance(token, dict) else token
        found = self._tokenizer.token_to_id(text) if text is not None else None
        return default if found is None else int(found)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Return the tokens' text."""
        del kwargs
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(source: str | Path) -> TokenizerBase:
    """Return the tokenizer of a model directory, or a `ByteTokenizer` where there is none."""
    directory = Path(source)
    return TransformersTokenizer(directory) if (directory / "tokenizer.json").is_file() else ByteTokenizer()


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
