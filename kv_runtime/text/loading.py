"""Loads a model's text: the built-in byte model, or a directory with a tokenizer.

Without `tokenizer.json`, a `tekken.json`, `tiktoken.model` or `qwen.tiktoken` is converted (`ranked_tokens.py`).
A model with another tokenizer is loaded without it (`UnreadText`): only its engines can tokenize its prompts.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tokenizers import Tokenizer

from kv_runtime.text.byte_model import BYTE_MODEL, ByteText
from kv_runtime.text.chat_messages import TextError, digest_of
from kv_runtime.text.chat_template import file_content, read_template
from kv_runtime.text.encoders import Wanted, choose_encoder, text_error
from kv_runtime.text.model import Text
from kv_runtime.text.ranked_tokens import TokenizerFile, ranked_tokens
from kv_runtime.text.tokenizer_model import TokenizerText

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


class UnreadText(Text):
    """The text of a model whose tokenizer the router cannot read: each method raises `TextError`."""

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


def local_directory(name: str) -> str:
    """Return a model's directory on this machine, found by its path or its name on the hub; empty: there is none.

    Source: huggingface/huggingface_hub, `src/huggingface_hub/constants.py` (`HF_HUB_CACHE`) and `file_download.py`
    (`repo_folder_name`, `refs/main`).
    """
    if Path(name).is_absolute():
        return name if Path(name).is_dir() else ""
    if not _HUB_NAME.fullmatch(name):
        return ""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs/main").read_text().strip()
    except (OSError, ValueError):
        return ""
    found = folder / "snapshots" / revision
    return str(found) if _HUB_NAME.fullmatch(revision) and found.is_dir() else ""


def load_text(model_path: str, encoder: Wanted = "hf", *, chat_template: str = "") -> Text:
    """Return the text of the model "byte", or of a model in a local directory, encoded by this kind of `encoder`.

    `chat_template` is a Jinja file that replaces the directory's own template; empty: no replacement.

    Raises:
        TextError: `model_path` is neither, a file is broken, or the required fast encoder fails its self-check.
    """
    if model_path == BYTE_MODEL:
        if chat_template:
            raise TextError("chat_template", chat_template, f"none: {BYTE_MODEL!r} has one of its own")
        return ByteText()
    directory = Path(model_path)
    if not model_path or not directory.is_dir():
        raise TextError("model", model_path, f"{BYTE_MODEL!r} or a local directory with a tokenizer")
    path = directory / "tokenizer.json"
    converted = None if path.exists() else ranked_tokens(directory)
    if converted is None and not path.exists() and (directory / "config.json").is_file():
        return UnreadText(model_path)
    path, content, special_tokens = converted or TokenizerFile(path, file_content(path), {})
    allowed = "what the tokenizers library reads"
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise TextError(str(path), str(error), allowed) from error
    except BaseException as error:  # noqa: BLE001 - a panic, or raised again
        raise text_error(error, str(path), allowed) from None
    tokenizer.no_truncation()  # a file may enable either; a prompt is neither truncated nor padded
    tokenizer.no_padding()
    chosen = choose_encoder(tokenizer, content, encoder)
    template = read_template(directory, chat_template, special_tokens)
    return TokenizerText(tokenizer, digest_of(content), template, chosen)
