"""Text to token ids: `tokenizers` is the reference; `fastokens` is faster and is used if it is equal.

    wanted   used
    hf       the reference
    auto     the fast one if it passes the self-check; else the reference, with the reason
    fast     the fast one; a model that fails the self-check is refused

The self-check is a fixed corpus (`encoder_check.py`) with every added token of the model among words and spaces. If the
fast one raises for a text later, the reference encodes that text, and the failure is counted.
"""

import array
import sys
from typing import Literal, Protocol

import fastokens  # type: ignore[import-untyped]  # it ships no types
from tokenizers import Tokenizer

from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.encoder_check import first_difference

CONFIGURED = "configured"
"""The reason of a configured encoder."""

Wanted = Literal["auto", "hf", "fast"]


class Encoder(Protocol):
    """Encodes text. Thread-safe."""

    name: str
    reason: str
    """Why this encoder was chosen."""
    failures: int
    """Texts for which it failed and the reference was used."""

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids as little-endian u32s, optionally with the model's special tokens around them."""


class HfEncoder:
    """The reference. Its batch call releases the interpreter; its call for one text does not."""

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
    """The used interface of the fast library."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool = ...) -> tuple[bytes, bytes]:  # noqa: FBT001
        """Return the ids of all inputs as little-endian u32s, and where each begins."""


class FastEncoder:
    """The fast encoder, with the reference as fallback."""

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
        except Exception:  # noqa: BLE001 - its regular expressions may raise anything
            self.failures += 1
            return self._truth.pack(text, add_special_tokens=add_special_tokens)


def choose_encoder(tokenizer: Tokenizer, content: bytes, wanted: Wanted = "auto") -> Encoder:
    """Return the encoder of the model whose `tokenizer.json` holds `content`, read as `tokenizer`.

    Raises:
        TextError: the fast one is required and not equal.
    """
    if wanted == "hf":
        return HfEncoder(tokenizer, CONFIGURED)
    try:
        fast = fastokens.Tokenizer.from_json_str(content.decode())
        fast.no_truncation()
        fast.no_padding()
        candidate = FastEncoder(fast, HfEncoder(tokenizer, ""), "equal in the self-check")
    except Exception as error:  # noqa: BLE001 - it raises various errors for unknown models
        why = f"fastokens does not read it: {error}"
    else:
        why = first_difference(tokenizer, candidate)
    if not why:
        return candidate
    if wanted == "fast":
        raise TextError("tokens.encoder", why, "fast for a model that it encodes as tokenizers does, auto, or hf")
    return HfEncoder(tokenizer, why)
