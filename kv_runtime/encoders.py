"""Text to token ids: the `tokenizers` library is the truth, `fastokens` is fast, and is used where it proved equal.

    wanted   used
    hf       the truth
    auto     the fast one where it encodes all of the self-check as the truth does; else the truth, and why
    fast     the fast one; a model for which it is not equal is refused

The self-check is a fixed corpus (`encoder_check.py`), in all of which every added token of the model stands once among
words, spaces and its like. Should the fast one fail at a text later on, that text gets the truth's ids, and is counted.
"""

import array
import sys
from typing import Literal, Protocol

import fastokens  # type: ignore[import-untyped]  # it ships no types
from tokenizers import Tokenizer

from kv_runtime.chat_messages import TextError
from kv_runtime.encoder_check import first_difference

CONFIGURED = "configured"
"""The reason of an encoder that was asked for."""

Wanted = Literal["auto", "hf", "fast"]


class Encoder(Protocol):
    """What turns text into ids. Several threads may use it at once."""

    name: str
    reason: str
    """Why it is this one."""
    failures: int
    """Texts at which it failed, and which another encoded."""

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids as little-endian u32s; with what the model wants around a prompt, if so asked."""


class HfEncoder:
    """The truth. Its batches let other threads run meanwhile; a single text would hold the interpreter."""

    name = "hf"
    failures = 0

    def __init__(self, tokenizer: Tokenizer, reason: str) -> None:
        self._tokenizer = tokenizer
        self.reason = reason

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids."""
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = array.array("I", encoded.ids)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()


class EncodesFlat(Protocol):
    """What is asked of the fast library."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool = ...) -> tuple[bytes, bytes]:  # noqa: FBT001
        """Return the ids of all inputs as little-endian u32s, and where each begins."""


class FastEncoder:
    """The fast one, with the truth behind it."""

    name = "fast"

    def __init__(self, tokenizer: EncodesFlat, truth: Encoder, reason: str) -> None:
        self._tokenizer = tokenizer
        self._truth = truth
        self.reason = reason
        self.failures = 0

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids."""
        try:
            return self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)[0]
        except Exception:  # noqa: BLE001 - whatever its regular expressions ran into
            self.failures += 1
            return self._truth.pack(text, add_special_tokens=add_special_tokens)


def choose_encoder(tokenizer: Tokenizer, content: bytes, wanted: Wanted = "auto") -> Encoder:
    """Return the encoder of the model whose `tokenizer.json` holds `content`, read as `tokenizer`.

    Raises:
        TextError: the fast one is wanted, and is not equal.
    """
    if wanted == "hf":
        return HfEncoder(tokenizer, CONFIGURED)
    try:
        fast = fastokens.Tokenizer.from_json_str(content.decode())
        fast.no_truncation()
        fast.no_padding()
        candidate = FastEncoder(fast, HfEncoder(tokenizer, ""), "equal in the self-check")
    except Exception as error:  # noqa: BLE001 - a model that it does not know, whatever it says of it
        why = f"fastokens does not read it: {error}"
    else:
        why = first_difference(tokenizer, candidate)
    if not why:
        return candidate
    if wanted == "fast":
        raise TextError("tokens.encoder", why, "fast for a model that it encodes as tokenizers does, auto, or hf")
    return HfEncoder(tokenizer, why)
