"""Keys of a request that stay bytes until they are needed, and the four forms of completions' prompts.

    "text"    [1, 2]    ["text", "text"]    [[1, 2], [3]]

Ids are read in slices: a million of them, decoded in one call, hold the interpreter for tens of milliseconds.
"""

import re
from contextlib import suppress
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from pydantic_core import from_json

from kv_protocol.errors import UNDECODABLE
from kv_protocol.hashing import pack_tokens
from kv_protocol.ids import TokenId
from kv_protocol.openai.errors import RequestInvalid, Verbatim, explained

ABSENT = msgspec.Raw()
"""The value of a key that the client did not send."""
_NULL = b"null"
_NOTHING = (b"", _NULL)


def is_given(option: msgspec.Raw) -> bool:
    """Return whether the client sent the key with a value other than null."""
    return option is not ABSENT and (len(option) > len(_NULL) or bytes(option) not in _NOTHING)


Read = TypeVar("Read")


class RawPart(Generic[Read]):
    """Decodes the bytes of one key on demand."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401 - a type as msgspec takes it
        self._kind = kind
        self._decoder: msgspec.json.Decoder[Read] = msgspec.json.Decoder(kind)

    def read(self, raw: msgspec.Raw, key: str) -> Read:
        """Decode the bytes; raise `RequestInvalid`, which names the place under `key`."""
        try:
            return self._decoder.decode(raw)
        except UNDECODABLE as error:
            raise explained(error, raw, self._kind, key) from error


class OptionalPart(RawPart[Read | None]):
    """Decodes the bytes of a key that may be absent, or null."""

    def read(self, raw: msgspec.Raw, key: str) -> Read | None:
        """Decode the bytes; return None if the key is absent or null; raise `RequestInvalid`."""
        return super().read(raw, key) if is_given(raw) else None


LONG_BYTES = 4 << 10
"""msgspec reads JSON that is mostly text up to this size only: it takes a nanosecond for each byte of a string."""
_messages = RawPart[list[dict[str, Any]]](Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)])


def read_messages(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """Return the messages of a chat; raise `RequestInvalid`, which names the place."""
    if len(raw) > LONG_BYTES:
        with suppress(ValueError):
            found = from_json(bytes(raw), allow_inf_nan=False)  # a quarter of the time, without names of places
            if isinstance(found, list) and all(isinstance(each, dict) for each in found):
                return found
    return _messages.read(raw, "messages")


_SLICE = 128 << 10
_LIST_OF_PROMPTS = re.compile(rb"\[\s*[\[\"]")
_LOOKED_AT = 64
PROMPTS_MAX = 1024
"""The most prompts of one request: the engine gets a request for each."""
_INDEX = re.compile(r"\[(\d+)\]")

_TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
_prompt = RawPart[str | list[int]](Annotated[str, msgspec.Meta(min_length=1)] | _TokenIds)
_ids = RawPart[list[int]](_TokenIds)
_several = msgspec.json.Decoder(list[msgspec.Raw])


def is_list_of_prompts(raw: msgspec.Raw) -> bool:
    """Return whether `raw` is a list of texts or of lists of ids, also if it has only one."""
    return _LIST_OF_PROMPTS.match(bytes(memoryview(raw)[:_LOOKED_AT])) is not None


def read_prompts(raw: msgspec.Raw) -> list[str | bytes]:
    """Return each prompt: a text, or ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
    if not is_list_of_prompts(raw):
        return [_read_one(raw, "prompt")]
    prompts = _several.decode(raw)
    if len(prompts) > PROMPTS_MAX:
        raise RequestInvalid("prompt", Verbatim(f"{len(prompts)} prompts"), f"at most {PROMPTS_MAX}")
    return [_read_one(each, f"prompt[{at}]") for at, each in enumerate(prompts)]


def _read_one(raw: msgspec.Raw, key: str) -> str | bytes:
    if bytes(memoryview(raw)[:1]) == b"[":
        return read_ids(raw, key)
    text = _prompt.read(raw, key)
    assert isinstance(text, str), "only a list begins as one"
    return text


def read_ids(raw: msgspec.Raw, key: str) -> bytes:
    """Return a list of token ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
    end = len(raw) - 1
    if end <= _SLICE or bytes(memoryview(raw)[:1]) != b"[":
        return pack_tokens(_ids.read(raw, key))
    view, at, parts, count = memoryview(raw), 1, [], 0
    while at < end:
        piece = bytes(view[at : min(at + _SLICE, end)])
        if at + len(piece) < end:
            piece = piece[: max(0, piece.rfind(b","))]
        ids = _decoded(piece, key, count)
        parts.append(pack_tokens(ids))
        count += len(ids)
        at += len(piece) + 1
    return b"".join(parts)


def _decoded(piece: bytes, key: str, before: int) -> list[int]:
    try:
        return _ids.read(msgspec.Raw(b"[%b]" % piece), "")
    except RequestInvalid as error:
        at = _INDEX.fullmatch(error.field)
        param = f"{key}[{before + int(at[1])}]" if at else key
        raise RequestInvalid(param, error.found, error.allowed if at else "token ids") from error
