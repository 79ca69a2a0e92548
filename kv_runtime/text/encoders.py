"""Text to token ids: `tokenizers` is the reference; `fastokens` is faster, and is used if it gives the same ids.

    wanted   used
    hf       tokenizers
    auto     fastokens if it passes the self-check; else tokenizers, and `reason` says why
    fast     fastokens; a model that fails the self-check is refused

After `keep_segments` either keeps the ids of a chat's segments, so that a next turn encodes its new segments only.

The self-check compares the ids of a fixed corpus (`encoder_check.py`) that has every added token of the model among
words and spaces. If fastokens raises for a text later, tokenizers encodes that text, and the failure is counted.

Both libraries are Rust: they panic at input that they do not expect, such as a text at which a regular expression
exceeds its limits. A panic is raised as a `BaseException` that is no `Exception`; `text_error` makes it a `TextError`.
"""

import array
import re
import sys
from collections.abc import Mapping
from typing import Literal, Protocol

import fastokens  # type: ignore[import-untyped]  # it ships no types
import msgspec
from tokenizers import Tokenizer

from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.encoder_check import first_difference
from kv_runtime.text.marks import KeptSegments, Segments

IDS_MAX = 1 << 24
"""fastokens allocates a table up to the largest id; vocabularies have some 2^18."""
CONFIGURED = "configured"
"""The `reason` of an encoder that the settings name."""

Wanted = Literal["auto", "hf", "fast"]


def is_panic(error: BaseException) -> bool:
    """Return whether a Rust library panicked. Each has its own class of this name, and does not export it."""
    return type(error).__name__ == "PanicException"


def text_error(error: BaseException, field: str, allowed: str) -> BaseException:
    """Return the `TextError` of a panic; any other error as it is."""
    return TextError(field, str(error), allowed) if is_panic(error) else error


class Encoder(Protocol):
    """Encodes text. Thread-safe."""

    name: str
    reason: str
    """Why this encoder was chosen."""
    failures: int
    """Texts for which it failed and the reference was used."""

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids as little-endian u32s, optionally with the model's special tokens around them.

        A panic of the library is raised as it is: the caller makes it a `TextError` that names the text's field.
        """

    def keep_segments(self, marks: re.Pattern[str], bytes_max: int) -> None:
        """Keep the ids of text between `marks`, in at most about `bytes_max` bytes."""

    def kept(self) -> KeptSegments:
        """Return the totals and the size of the kept segments."""


class HfEncoder:
    """The reference. Its batch call releases the interpreter; its call for one text does not."""

    name = "hf"
    failures = 0

    def __init__(self, tokenizer: Tokenizer, reason: str) -> None:
        self._tokenizer = tokenizer
        self._segments: Segments | None = None
        self.reason = reason

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids."""
        if self._segments is not None and not add_special_tokens:
            return self._segments.pack(text, self._packed)
        return self._packed([text], add_special_tokens=add_special_tokens)[0]

    def _packed(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        packed = [array.array("I", each.ids) for each in encoded]
        if sys.byteorder == "big":
            for ids in packed:
                ids.byteswap()
        return [ids.tobytes() for ids in packed]

    def keep_segments(self, marks: re.Pattern[str], bytes_max: int) -> None:
        """Keep the ids of text between `marks`, in at most about `bytes_max` bytes."""
        self._segments = Segments(marks, bytes_max)

    def kept(self) -> KeptSegments:
        """Return the totals and the size of the kept segments."""
        return KeptSegments() if self._segments is None else self._segments.kept()


class FlatTokenizer(Protocol):
    """What is used of a tokenizer of fastokens."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool = ...) -> tuple[bytes, bytes]:  # noqa: FBT001
        """Return the ids of all inputs as little-endian u32s, and where each begins."""

    def enable_segment_cache(self, max_bytes: int) -> None:
        """Keep the ids of text between added tokens; the library itself finds where text may be cut."""

    def segment_cache_stats(self) -> Mapping[str, int] | None:
        """Return the totals and the size of the kept segments; None if none are kept."""


class FastEncoder:
    """The fast encoder, with the reference as fallback."""

    name = "fast"

    def __init__(self, tokenizer: FlatTokenizer, reference: Encoder, reason: str) -> None:
        self._tokenizer = tokenizer
        self._reference = reference
        self.reason = reason
        self.failures = 0

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids."""
        try:
            return self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            self.failures += 1
            return self._reference.pack(text, add_special_tokens=add_special_tokens)

    def keep_segments(self, marks: re.Pattern[str], bytes_max: int) -> None:  # noqa: ARG002 - fastokens knows its own
        """Keep the ids of text between added tokens, in at most `bytes_max` bytes."""
        self._tokenizer.enable_segment_cache(bytes_max)

    def kept(self) -> KeptSegments:
        """Return the totals and the size of the kept segments."""
        statistics = self._tokenizer.segment_cache_stats() or {}
        return KeptSegments(*[statistics.get(name, 0) for name in KeptSegments._fields])


def choose_encoder(tokenizer: Tokenizer, content: bytes, wanted: Wanted = "auto") -> Encoder:
    """Return the encoder of the model whose `tokenizer.json` holds `content`, read as `tokenizer`.

    Raises:
        TextError: fastokens is wanted, but fails the self-check.
    """
    if wanted == "hf":
        return HfEncoder(tokenizer, CONFIGURED)
    failed = "fastokens cannot read the tokenizer"
    try:
        _check_ids(content)
        fast = fastokens.Tokenizer.from_json_str(content.decode())
        fast.no_truncation()
        fast.no_padding()
        candidate = FastEncoder(fast, HfEncoder(tokenizer, ""), "equal in the self-check")
        failed = "the self-check fails"
        why = first_difference(tokenizer, candidate)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = f"{failed}: {error}"
    if not why:
        return candidate
    if wanted == "fast":
        raise TextError("tokens.encoder", why, "fast for a model that it encodes as tokenizers does, auto, or hf")
    return HfEncoder(tokenizer, why)


class _AddedToken(msgspec.Struct, gc=False):
    id: int


class _Ids(msgspec.Struct):
    """The ids of added tokens in a `tokenizer.json`."""

    added_tokens: list[_AddedToken] | None = None


def _check_ids(content: bytes) -> None:
    """Raise `ValueError` for an id so large that the table of fastokens would need too much memory."""
    largest = max((token.id for token in msgspec.json.decode(content, type=_Ids).added_tokens or ()), default=0)
    if largest > IDS_MAX:
        raise ValueError(f"the added token {largest} is beyond {IDS_MAX}")
